// Weights: the latest version of a block of bytes, published by a writer and read by anybody.
//
// Who may call: any process, any time; usually one writes. Nobody waits for anybody: a writer fills a buffer that is not the
// latest, and a reader whose buffer was recycled while it copied reads again.
//
//   latest      version << 8 | buffer. Grows with every publication, so it can be waited for.
//   state[b]    0: never used; above 0: the process that fills buffer b, up to and beyond its publication; below 0: was
//               published as version -state, once and for ever.
//
// A buffer is nobody's if it is not the latest and its writer has marked it as published, or is dead. With three buffers a
// single writer finds one always, and a reader has the time of at least one publication for its copy.
//
// If a writer dies before it publishes: the next one that looks for a buffer finds it dead and takes it. Between publication
// and mark: the buffer is the latest like any other, and the dead one's as soon as it is not. Readers go on with the latest
// in every case. No word waits for a process that could be dead.
//
//   offset  size  field      written by  when
//   0       64    latest     writers     publication (a signal)
//   64      64    state[8]   writers     claim, and after the publication
//   128     64    retries    readers     a copy was overwritten while it was made
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "sync/signal.hpp"
#include "sync/words.hpp"

namespace memlane {

inline constexpr int most_buffers = 8;

struct WeightsControl {
    SignalCell latest;
    alignas(64) Word state[most_buffers];
    alignas(64) Word retries;
};
static_assert(sizeof(WeightsControl) == 192);

constexpr std::int64_t version_of(std::int64_t latest) { return latest >> 8; }
constexpr int buffer_of(std::int64_t latest) { return static_cast<int>(latest & 0xFF); }

// A piece of the caller's memory and where in a buffer it belongs.
struct Part {
    std::size_t offset;
    std::byte *data;
    std::size_t bytes;
};

class Weights {
  public:
    Weights(std::byte *control, std::byte *buffers, int count, std::size_t stride_bytes);

    WeightsControl &control() const { return *control_; }

    // Copies the parts into a buffer and makes it the latest. Returns its version, or -1 when every buffer but the latest is
    // being filled by a living writer: there are fewer buffers than writers at work and one.
    std::int64_t publish(std::int64_t process, std::span<const Part> parts);

    // Copies the latest version out and returns its number; 0 and nothing copied when there is none.
    std::int64_t read(std::span<const Part> parts);

  private:
    std::byte *buffer(int index) const { return buffers_ + static_cast<std::size_t>(index) * stride_bytes_; }
    bool is_nobodys(int index, std::int64_t state) const;
    int claim(std::int64_t process);

    WeightsControl *control_;
    std::byte *buffers_;
    int count_;
    std::size_t stride_bytes_;
};

} // namespace memlane
