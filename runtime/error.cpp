#include "runtime/error.h"

#include <utility>

#include "runtime/shown.h"

namespace sherd {

Error::Error(const std::string& message, std::source_location where)
    : std::runtime_error(one_line(message)), where_(where) {}
CollectiveError::CollectiveError(const std::string& message, std::source_location where)
    : Error(message, where) {}
CollectiveError::CollectiveError(const std::string& message, std::vector<int> ranks, std::uint64_t sequence,
                                 std::source_location where)
    : Error(message, where), ranks_(std::move(ranks)), sequence_(sequence) {}

// Destructors are defined here so that each type has one vtable and one type_info, and can be caught outside
// the shared library.
Error::~Error() = default;
ValueError::~ValueError() = default;
ShapeError::~ShapeError() = default;
DTypeError::~DTypeError() = default;
DeviceError::~DeviceError() = default;
StateError::~StateError() = default;
CollectiveError::~CollectiveError() = default;
OutOfMemoryError::~OutOfMemoryError() = default;
NotImplementedError::~NotImplementedError() = default;
InternalError::~InternalError() = default;
FileError::~FileError() = default;

}  // namespace sherd
