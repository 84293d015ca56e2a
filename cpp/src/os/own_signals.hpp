// While an OwnSignals object lives, threads that its thread starts handle only the signals that they cause themselves.
// All others are blocked for them, so that Ctrl-C reaches the thread in which Python handles it. SIGSEGV and
// other signals that a fault causes are not blocked: a blocked SIGSEGV kills the process without running faulthandler.
#pragma once

#include <signal.h>

namespace memlane {

class OwnSignals {
  public:
    OwnSignals() {
        sigset_t others;
        sigfillset(&others);
        for (const int own : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS, SIGABRT})
            sigdelset(&others, own);
        pthread_sigmask(SIG_SETMASK, &others, &before_);
    }
    ~OwnSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
    OwnSignals(const OwnSignals &) = delete;
    OwnSignals &operator=(const OwnSignals &) = delete;

  private:
    sigset_t before_;
};

} // namespace memlane
