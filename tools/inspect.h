// `sherd inspect`: which rank owns which span of which parameter. Arithmetic only: no ranks, no memory.
#pragma once

#include <string>
#include <vector>

#include "runtime/io/file_system.h"
#include "shard/partition.h"
#include "tools/train_options.h"

namespace sherd::tools {

struct InspectOptions {
  std::string model = "gpt";
  TrainOptions sizes;  ///< of the model, and its ranks and layout; see `is_inspected`
  std::string svg;     ///< the drawing's file; none: no drawing
};

/// Whether a setting of `train` is one of `inspect` too.
bool is_inspected(const Setting& setting);

/// Consecutive elements of a segment with one owner.
struct Piece {
  int segment = 0, rank = 0;
  int parameter = -1;               ///< -1: padding
  std::int64_t begin = 0, end = 0;  ///< in the segment
  std::int64_t in_parameter = 0;    ///< of the first element
  std::int64_t numel() const { return end - begin; }
};

/// A module's parameters, or those of each of several modules that are placed alike.
struct PlacedGroup {
  std::string name;  ///< of its module; "blocks.{0..3}" of several; the model's own for what no block has
  std::int64_t modules = 1;
  std::vector<std::string> parameters;  ///< within the module
  std::vector<Shape> shapes;
  shard::Partition layout;
  std::vector<Piece> pieces;  ///< by segment and place; side by side they are the segments
};

/// Elements that a rank owns over all groups.
struct Owned {
  std::int64_t values = 0, padding = 0;
};

struct Placement {
  std::string model;
  bool flat = false;
  int ranks = 1;
  DType dtype = DType::f32;  ///< as stored
  std::vector<PlacedGroup> groups;

  std::int64_t group_count() const;
  /// Elements of all parameters.
  std::int64_t values() const;
  std::vector<Owned> by_rank() const;
};

/// Where `sherd train` with these options keeps everything. ValueError names the flag that is wrong.
Placement place(const InspectOptions& options);

/// A line a piece, once for modules that are placed alike, and the sums over all.
std::string table(const Placement& placement);

/// The table; the drawing too, if there is a file for it, which is complete or as it was before.
std::string inspect(const InspectOptions& options, FileSystem& files);

}  // namespace sherd::tools
