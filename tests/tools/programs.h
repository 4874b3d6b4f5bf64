// The programs of this build that these tests start, by their paths.
#pragma once

namespace sherd::built {

extern const char* const program;  ///< sherd
extern const char* const measure;
extern const char* const starter;  ///< start_processes

}  // namespace sherd::built
