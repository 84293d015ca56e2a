// The life token of this process on a segment, for lanes and for Python.
#pragma once

#include <cerrno>
#include <cstdint>
#include <memory>
#include <string>
#include <system_error>
#include <utility>

#include "python/errors.hpp"

namespace memlane {

// Raises SegmentError for a life token that could not be taken.
[[noreturn]] inline void raise_no_token(const std::string &label, const std::system_error &error) {
    const char *remedy = "use a file system with open-file-description locks, such as /dev/shm or a local disk";
    switch (error.code().value()) {
    case EMFILE:
    case ENFILE:
        remedy = "raise the limit of open files (ulimit -n)";
        break;
    case ENOENT:
        remedy = "mount /proc";
        break;
    case EBADF:
        remedy = "attach to it again";
        break;
    case EACCES:
        remedy = "use it as the user that its file belongs to";
        break;
    }
    raise("SegmentError", label +
                              " cannot be used: this process needs a lock on its file, which shows the other processes "
                              "that it is alive, but " +
                              error.what() + "; " + remedy);
}

// The identity of this process in the lane `label`. Takes its token if it has none.
inline std::int64_t process_in(Mapping &mapping, const std::string &label) {
    try {
        return mapping.life().process();
    } catch (const std::system_error &error) {
        raise_no_token(label, error);
    }
}

class LifeHandle {
  public:
    LifeHandle(std::shared_ptr<Mapping> mapping, std::string label)
        : mapping_(std::move(mapping)), label_(std::move(label)) {}

    std::int64_t process() const {
        require_open(*mapping_, label_);
        require_writeable(*mapping_, label_);
        return process_in(*mapping_, label_);
    }
    std::int64_t process_if_taken() const {
        require_open(*mapping_, label_);
        return mapping_->life().process_if_taken();
    }
    bool alive(std::int64_t process) const {
        require_open(*mapping_, label_);
        return mapping_->life().alive(process);
    }
    void check() const {
        require_open(*mapping_, label_);
        require_writeable(*mapping_, label_);
        try {
            mapping_->life().check();
        } catch (const std::system_error &error) {
            raise_no_token(label_, error);
        }
    }

  private:
    std::shared_ptr<Mapping> mapping_;
    std::string label_;
};

} // namespace memlane
