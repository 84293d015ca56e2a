// Weights: the latest version of a block of bytes, published by writers and read by any process.
//
// Who may call: any process, at any time; usually there is one writer. No call waits for another process: a writer
// fills a buffer that is not the latest, and a reader whose buffer was overwritten during its copy may copy again.
//
//   latest      version << 8 | buffer. Grows with every publication, so a reader can wait for it.
//   state[b]    0: never used.
//               above 0: the process that claimed buffer b, by its life token (os/life.hpp); it stays until shortly after
//               the publication.
//               below 0: the mark; buffer b was published as version -state.
//
// A buffer can be claimed if it is not the latest and either bears a mark, was never used, or its writer is dead. With
// two buffers a single writer always finds one.
//
// Of several, a writer claims the one that was published last: it is still in the cache (a publication and a read of
// 4 MB: 123 instead of 132 us on a busy machine). A reader that a writer overtakes asks for the opposite
// with `rotate_until`: for the next versions, writers claim the oldest, so that with three buffers a reader's copy stays
// valid for the time of at least one more publication. A reader that dies or stops after that costs only speed, and only
// until that version.
//
// If a writer dies
//   before it publishes               the next writer that searches for a buffer finds the process dead and claims it
//   between publication and mark      the buffer is the latest like any other; when it no longer is, it can be
//                                     claimed, because its writer is dead
// Readers continue with the latest version in every case. No call waits for a process that could be dead.
//
//   offset  size  field         written by  when
//   0       64    latest        writers     publication (a signal)
//   64      64    state[8]      writers     claim, and mark after the publication
//   128     8     retries       readers     a copy was overwritten while it was made
//   136     8     rotate_until  readers     likewise: the version up to which writers use all buffers in turn
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "os/life.hpp"
#include "sync/signal.hpp"
#include "sync/words.hpp"

namespace memlane {

inline constexpr int max_buffers = 8;

struct WeightsControl {
    SignalCell latest;
    alignas(64) Word state[max_buffers];
    alignas(64) Word retries;
    Word rotate_until;
};
static_assert(sizeof(WeightsControl) == 192);

constexpr std::int64_t version_of(std::int64_t latest) { return latest >> 8; }
constexpr int buffer_of(std::int64_t latest) { return static_cast<int>(latest & 0xFF); }
// No writer gets this far, and `version << 8` has room to spare.
inline constexpr std::int64_t max_version = std::int64_t{1} << 54;

// A contiguous piece of the caller's memory and its offset in a buffer.
struct Part {
    std::size_t offset; // in the buffer
    std::byte *data;
    std::size_t bytes;
};

class Weights {
  public:
    // `life` shows which processes are alive; it belongs to the file of the weights and outlives this object.
    Weights(std::byte *control, std::byte *buffers, int count, std::size_t stride_bytes, Life &life);

    WeightsControl &control() const { return *control_; }

    // The word `latest`. Throws StrayWord if it is none that a writer stores.
    std::int64_t latest() const;

    // Copies the parts into a buffer as `process`, an identity of `life`, and makes it the latest. Returns its version, or -1 if every buffer but the latest
    // is claimed by a live writer: N concurrent writers need N + 1 buffers. Throws StrayWord as `latest` does.
    std::int64_t publish(std::int64_t process, std::span<const Part> parts);

    // Copies the latest version out and returns its number. Returns 0 and copies nothing if there is none yet, and -1 if
    // a writer overtook the copy: the parts are then torn, and the caller tries again. Throws StrayWord as `latest` does.
    std::int64_t try_read(std::span<const Part> parts);

  private:
    std::byte *buffer(int index) const { return buffers_ + static_cast<std::size_t>(index) * stride_bytes_; }
    bool can_be_claimed(int index, std::int64_t state) const;
    int claim(std::int64_t process);

    WeightsControl *control_;
    std::byte *buffers_;
    int count_;
    std::size_t stride_bytes_;
    Life *life_;
};

} // namespace memlane
