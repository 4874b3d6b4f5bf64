// A scope in which the system runs no signal handler on this thread.
#pragma once

#include <pthread.h>

#include <csignal>

namespace sherd::detail {

/// Signals that come are handled when it ends, or by another thread. Those of a fault of the thread's own are
/// not held: the system would end the process without a word. Threads that are started within hold them as
/// long as they live. Takes half a microsecond.
class SignalsHeld {
 public:
  SignalsHeld() {
    sigset_t held;
    ::sigfillset(&held);
    for (const int fault : {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGTRAP, SIGABRT, SIGSYS})
      ::sigdelset(&held, fault);
    ::pthread_sigmask(SIG_BLOCK, &held, &before_);
  }
  ~SignalsHeld() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsHeld(const SignalsHeld&) = delete;
  SignalsHeld& operator=(const SignalsHeld&) = delete;

 private:
  sigset_t before_;
};

}  // namespace sherd::detail
