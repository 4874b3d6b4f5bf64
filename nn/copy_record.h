// What a copy of a module copied, to check that `visit` names all of it.
#pragma once

#include <memory>
#include <string>
#include <vector>

namespace sherd::nn {

/// While this exists, a copy of a module on this rank has empty parameters and buffers, so that no copy
/// constructor can change the original's values, and writes down every member that it copies and that holds
/// something. Records nest.
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

  /// The newest record on this rank, or null.
  static CopyRecord* current();
  void add(const void* member, std::string what);
  const std::vector<Member>& members() const { return members_; }

 private:
  struct Outer;
  std::unique_ptr<Outer> outer_;  // the state of the clone or record under way before
  std::vector<Member> members_;
};

}  // namespace sherd::nn
