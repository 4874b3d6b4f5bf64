// What a copy of a module copies, for the check that `visit` names all of it.
#pragma once

#include <memory>
#include <string>
#include <vector>

namespace sherd::nn {

/// While it lives, copies of modules on this rank share parameters and buffers with the original, and each
/// member that was copied is written down.
class CopyRecord {
 public:
  struct Member {
    const void* address;  ///< of the original's Param, Buffer or Module
    std::string what;     ///< for a message
  };

  CopyRecord();
  ~CopyRecord();
  CopyRecord(const CopyRecord&) = delete;
  CopyRecord& operator=(const CopyRecord&) = delete;

  /// This rank's, or null.
  static CopyRecord* current();
  void add(const void* member, std::string what);
  const std::vector<Member>& members() const { return members_; }

 private:
  struct Outer;
  std::unique_ptr<Outer> outer_;  // the clone that was under way before
  std::vector<Member> members_;
};

}  // namespace sherd::nn
