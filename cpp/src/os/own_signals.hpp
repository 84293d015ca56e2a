// While one of these lives, new threads are born that take none of the process's signals: Ctrl-C belongs to the thread that
// Python waits on. Those that a thread causes itself stay: a blocked SIGSEGV kills without the handler that could say where.
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
