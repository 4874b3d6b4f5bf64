#include "runtime/cpu/conv_tiles.h"

namespace sherd::cpu::conv {

using std::int64_t;

Range part_of(int64_t n, int64_t unit, int64_t parts, int64_t index) {
  const int64_t blocks = ceil_div(n, unit);
  return {blocks * index / parts * unit, std::min(n, blocks * (index + 1) / parts * unit)};
}

namespace {

/// What `width` cuts: groups if there are several, else what the way computes.
int64_t width_of(const Conv& c, Way way) {
  return c.rule.groups > 1 ? c.rule.groups : way == Way::grad_input ? c.channels : c.outputs;
}
/// Vectors of the library hold 16 channels of a group, or 16 groups of one.
int64_t unit_of(const Conv& c) { return c.rule.groups > 1 && !(c.channels == 1 && c.outputs == 1) ? 1 : 16; }

}  // namespace

Cuts cuts_of(const Conv& c, Way way) {
  constexpr int64_t enough = 1 << 21, room = 1 << 18, wanted = 16, fewest_rows = 4, fewest_pixels = 1024;
  const int64_t work = std::max<int64_t>(1, c.rule.groups * c.output() * c.taps()),
                elements = c.rule.groups * (c.input() + c.output()), pixels = c.down * c.across;
  int64_t together = std::min(enough / work, room / elements);
  // A gradient of kernels is added to a sum as large as itself, which few pixels do not pay for.
  if (way == Way::grad_weight) together = std::max(together, ceil_div(fewest_pixels, pixels));
  const int64_t images = ceil_div(c.images, std::clamp<int64_t>(together, 1, c.images));
  const int64_t more = std::clamp<int64_t>(work / enough, 1, ceil_div(wanted, images));
  const auto [stride, padding, dilation] = c.rule.down;
  int64_t most_rows = way == Way::grad_input ? c.rows / (fewest_rows * stride) : c.down / fewest_rows;
  if (way == Way::grad_weight) most_rows = std::min(most_rows, pixels / fewest_pixels);
  if (stride > extent(c.rule.down, c.height)) most_rows = 1;
  most_rows = std::max<int64_t>(most_rows, 1);
  const int64_t most_width = std::max<int64_t>(width_of(c, way) / (2 * unit_of(c)), 1);
  const int64_t parts = std::max(more, elements / room);
  if (c.rule.groups > 1) {  // which share no pixels, where blocks of rows do
    const int64_t width = std::clamp<int64_t>(parts, 1, most_width);
    return {images, std::clamp<int64_t>(parts / width, 1, most_rows), width};
  }
  const int64_t rows = std::clamp<int64_t>(parts, 1, most_rows);
  return {images, rows, std::clamp<int64_t>(ceil_div(more, rows), 1, most_width)};
}

namespace {

/// Sets the rows that a tile reads and writes.
void cut_rows(const Conv& c, Way way, Range part, Tile& tile) {
  const int64_t stride = c.rule.down.stride, padding = c.rule.down.padding,
                seen = extent(c.rule.down, c.height);
  if (way == Way::grad_input) {
    const int64_t first = part.begin + padding - seen + 1;  // of what may see the part, in the padded image
    tile.rows = part;
    tile.down = {first > 0 ? ceil_div(first, stride) : 0,
                 std::min(c.down, (part.end - 1 + padding) / stride + 1)};
    tile.top = padding + part.begin - tile.down.begin * stride;
  } else {
    const int64_t first = part.begin * stride - padding, last = (part.end - 1) * stride - padding + seen;
    tile.down = part;
    tile.rows = {std::max<int64_t>(first, 0), std::min(last, c.rows)};
    tile.top = tile.rows.begin - first;
  }
  tile.bottom = (tile.down.size() - 1) * stride + seen - tile.top - tile.rows.size();
}

}  // namespace

Tile tile_of(const Conv& c, Way way, const Cuts& cuts, int64_t unit, int64_t width) {
  Tile tile{.images = part_of(c.images, 1, cuts.images, unit / cuts.rows),
            .groups = {0, c.rule.groups},
            .channels = {0, c.channels},
            .outputs = {0, c.outputs}};
  (c.rule.groups > 1        ? tile.groups
   : way == Way::grad_input ? tile.channels
                            : tile.outputs) = part_of(width_of(c, way), unit_of(c), cuts.width, width);
  cut_rows(c, way, part_of(way == Way::grad_input ? c.rows : c.down, 1, cuts.rows, unit % cuts.rows), tile);
  return tile;
}

int64_t images_at(const Conv& c, const Tile& t) {
  return t.images.begin * c.steps.image + (t.groups.begin * c.channels + t.channels.begin) * c.steps.channel +
         t.rows.begin * c.steps.row;
}
int64_t outputs_at(const Conv& c, const Tile& t) {
  return (t.images.begin * c.rule.groups + t.groups.begin) * c.output() +
         (t.outputs.begin * c.down + t.down.begin) * c.across;
}
int64_t kernels_at(const Conv& c, const Tile& t) {
  return (t.groups.begin * c.outputs + t.outputs.begin) * c.taps() + t.channels.begin * c.height * c.width;
}
int64_t biases_at(const Conv& c, const Tile& t) { return t.groups.begin * c.outputs + t.outputs.begin; }

}  // namespace sherd::cpu::conv
