// Which sanitizer this build has, for tests whose cost or memory it changes.
#pragma once

namespace sherd::test {

#ifdef __SANITIZE_THREAD__
inline constexpr bool thread_sanitizer = true;
#else
inline constexpr bool thread_sanitizer = false;
#endif
#ifdef __SANITIZE_ADDRESS__
inline constexpr bool address_sanitizer = true;
#else
inline constexpr bool address_sanitizer = false;
#endif
inline constexpr bool sanitized = thread_sanitizer || address_sanitizer;

}  // namespace sherd::test
