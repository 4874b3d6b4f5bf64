// One flat parameter made of many: where each of them lies in it, and which of it a range holds.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "nn/module.h"
#include "shard/partition.h"

namespace sherd::shard {

struct FlatParamOptions {
  int ranks = 1;
  /// What parameters are computed in; decides the alignment. None: their own dtype.
  std::optional<DType> param_dtype{};
  /// Whether parameters stay visible by their own names. Then each begins at a multiple of 16 bytes of the
  /// compute dtype, and padding makes the total divide by the ranks; else they lie one directly after
  /// another.
  bool use_orig_params = false;
};

/// A parameter that has elements in a range of the flat parameter.
struct FlatShardEntry {
  std::string name;
  Shape shape;  ///< of the whole parameter, as is `numel`
  std::int64_t numel = 0;
  std::int64_t first = 0, last = 0;  ///< elements of the parameter within the range, both inclusive
  std::int64_t in_shard = 0;         ///< offset of `first` in the range
  friend bool operator==(const FlatShardEntry&, const FlatShardEntry&) = default;
};

/// Says where parameters would lie in a flat one. Only describes: the module and its parameters stay as they
/// are.
class SHERD_API FlatParamHandle {
 public:
  /// A later name of a parameter that an earlier one owns.
  struct Tie {
    std::string name, owner;
    friend bool operator==(const Tie&, const Tie&) = default;
  };

  /// Lays out `parameters` in the order of `module`'s members; a tied one lies where its first name is.
  /// ValueError for none, for one that the module does not have, and, without
  /// use_orig_params, for trainable beside frozen ones; DTypeError unless they have one floating dtype;
  /// DeviceError unless they are on one device.
  FlatParamHandle(std::span<const nn::Parameter> parameters, const nn::Module& module,
                  FlatParamOptions options = {});

  const Partition& partition() const { return partition_; }
  /// Elements of the unsharded flat parameter: all padding included with use_orig_params, else none.
  std::int64_t numel() const { return numel_; }
  /// As stored, whatever it is computed in.
  DType dtype() const { return members_.parameters[0].local().dtype(); }
  /// In the order of the partition.
  const std::vector<std::string>& names() const { return members_.names; }
  const std::vector<nn::Parameter>& parameters() const { return members_.parameters; }
  const std::vector<Tie>& ties() const { return members_.ties; }

  /// The unsharded flat parameter as a new tensor: values, and what padding holds.
  Tensor flat() const;
  /// The parameters with elements from `start` to `end`, both inclusive and counted with padding; `end` may
  /// lie behind the last element.
  std::vector<FlatShardEntry> shard_metadata(std::int64_t start, std::int64_t end) const;

 private:
  struct Members {
    std::vector<nn::Parameter> parameters;
    std::vector<std::string> names;
    std::vector<Tie> ties;
  };
  static Members collect(std::span<const nn::Parameter> parameters, const nn::Module& module);
  static void check_alike(const Members& members, bool use_orig_params);
  FlatParamHandle(Members members, const FlatParamOptions& options);

  Members members_;
  Partition partition_;
  std::int64_t numel_ = 0;
};

}  // namespace sherd::shard
