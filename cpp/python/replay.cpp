// Bindings of the replay: rows are added as a dict of arrays and sampled as rows of one block.

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <deque>
#include <memory>
#include <memory_resource>
#include <optional>
#include <ranges>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "lanes/batch_prefetcher.hpp"
#include "lanes/replay.hpp"
#include "lanes/sampler.hpp"
#include "python/block_pool.hpp"
#include "python/life.hpp"
#include "python/module.hpp"
#include "python/numpy_arrays.hpp"
#include "python/waits.hpp"

using namespace nb::literals;
using namespace memlane;

namespace {

using Bytes = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using StreamIndices = nb::ndarray<std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// The name of a field, its bytes in the packed row, and the dtype and shape of one row of it.
struct Column {
    using Tuple = std::tuple<nb::object, std::size_t, std::size_t, nb::object, std::vector<npy_intp>>;

    nb::object name;
    FieldSlice slice;
    nb::object dtype;
    std::vector<npy_intp> shape;

    explicit Column(const Tuple &tuple)
        : name(std::get<0>(tuple)), slice{std::get<1>(tuple), std::get<2>(tuple)}, dtype(std::get<3>(tuple)),
          shape(std::get<4>(tuple)) {}
};

PyObject *dtype_of(const char *name) { return nb::module_::import_("numpy").attr("dtype")(name).release().ptr(); }

// The arrays of one `add` as Fields: in place, or converted if they are Python numbers or float64 for a float32 field.
// `accepted` is false if the dict needs the slower check in Python. Memory for up to a dozen fields is on the stack:
// this class takes most of the time of adding one row.
class InputRows {
  public:
    // `expected`: the number of rows, or -1 for any. `all`: whether every column must be present.
    InputRows(const std::vector<Column> &columns, nb::handle rows, std::int64_t expected, bool all) {
        accepted = PyDict_CheckExact(rows.ptr()) &&
                   (!all || static_cast<std::size_t>(PyDict_GET_SIZE(rows.ptr())) == columns.size());
        if (!accepted)
            return;
        fields.reserve(columns.size());
        held_.reserve(columns.size());
        field_indices.reserve(columns.size());
        for (std::size_t k = 0; k < columns.size() && accepted; ++k) {
            PyObject *value = PyDict_GetItemWithError(rows.ptr(), columns[k].name.ptr());
            if (value == nullptr) {
                if (PyErr_Occurred())
                    throw nb::python_error();
                accepted = !all;
                continue;
            }
            field_indices.push_back(k);
            accepted = append(columns[k], value, expected);
        }
        accepted =
            accepted && count >= 0 && (all || field_indices.size() == static_cast<std::size_t>(PyDict_GET_SIZE(rows.ptr())));
    }

  private:
    alignas(16) std::byte stack_[1024];
    std::pmr::monotonic_buffer_resource memory_{stack_, sizeof stack_};
    std::pmr::vector<nb::object> held_{&memory_};

  public:
    bool accepted;
    std::int64_t count = -1;
    std::pmr::vector<Field> fields{&memory_};
    std::pmr::vector<std::size_t> field_indices{&memory_}; // the column of each field

  private:
    // Whether all fields have the same number of rows, and the expected one.
    bool check_count(std::int64_t rows, std::int64_t expected) {
        if (count < 0)
            count = rows;
        return count == rows && (expected < 0 || rows == expected);
    }
    template <class T> void append_scalar(T value) {
        auto *to = static_cast<std::byte *>(memory_.allocate(sizeof value));
        std::memcpy(to, &value, sizeof value);
        fields.push_back({to, sizeof value, sizeof value});
    }
    // Converts to float. False if a finite number would become infinite: the slower check in Python reports which one.
    static bool narrow(std::span<const double> from, float *to) {
        std::ranges::transform(from, to, [](double number) { return static_cast<float>(number); });
        // As integers, in which inf and nan are the largest: the compiler vectorises this, and it takes a fifth of the
        // time.
        std::int32_t largest = 0;
        for (std::size_t i = 0; i < from.size(); ++i)
            largest = std::max(largest, std::bit_cast<std::int32_t>(to[i]) & 0x7fffffff);
        if (largest < 0x7f800000)
            return true;
        for (std::size_t i = 0; i < from.size(); ++i)
            if (std::isfinite(from[i]) && !std::isfinite(to[i]))
                return false;
        return true;
    }
    bool append(const Column &column, PyObject *value, std::int64_t expected) {
        static PyObject *const float32 = dtype_of("float32"), *const float64 = dtype_of("float64"),
                               *const boolean = dtype_of("bool");
        const std::size_t bytes = column.slice.bytes;
        PyObject *const dtype = column.dtype.ptr();
        PlainArray array;
        if (PlainArray::try_view(value, array)) {
            const bool batched = array.shape.size() == column.shape.size() + 1;
            if (!std::ranges::equal(column.shape, array.shape.subspan(batched ? 1 : 0)))
                return false;
            const std::int64_t rows = batched ? array.shape[0] : 1;
            if (array.dtype != dtype) {
                // The most common conversion: environments return rewards as float64.
                if (array.dtype != float64 || dtype != float32 ||
                    reinterpret_cast<std::uintptr_t>(array.data) % alignof(double) != 0)
                    return false;
                const std::size_t numbers = static_cast<std::size_t>(rows) * bytes / sizeof(float);
                const auto *from = reinterpret_cast<const double *>(array.data);
                array.data = static_cast<std::byte *>(memory_.allocate(numbers * sizeof(float)));
                if (!narrow({from, numbers}, reinterpret_cast<float *>(array.data)))
                    return false;
            }
            held_.push_back(nb::borrow(value)); // another thread may empty the dict while this one copies
            fields.push_back({array.data, bytes, bytes});
            return check_count(rows, expected);
        }
        if (!column.shape.empty())
            return false;
        if (PyFloat_Check(value) && dtype == float32) {
            const double number = PyFloat_AS_DOUBLE(value);
            float narrowed;
            if (!narrow({&number, 1}, &narrowed))
                return false;
            append_scalar(narrowed);
        } else if (PyFloat_Check(value) && dtype == float64)
            append_scalar(PyFloat_AS_DOUBLE(value));
        else if (PyBool_Check(value) && dtype == boolean)
            append_scalar(value == Py_True);
        else
            return false;
        return check_count(1, expected);
    }
};

class ReplayHandle {
  public:
    ReplayHandle(std::shared_ptr<Mapping> mapping, std::size_t control, std::size_t stored, std::size_t rows,
                 std::optional<std::size_t> tree, std::size_t streams, std::int64_t stream_count, std::int64_t capacity,
                 std::size_t stride, const std::vector<Column::Tuple> &columns,
                 std::tuple<std::size_t, std::size_t, std::size_t, bool> transition,
                 std::tuple<double, std::int64_t, double> limit, double alpha, std::string label)
        : mapping_(std::move(mapping)), label_(std::move(label)), columns_(columns.begin(), columns.end()), alpha_(alpha),
          stream_count_(stream_count),
          streams_(reinterpret_cast<std::int64_t *>(
              checked_address(*mapping_, streams, bytes_of(stream_count, sizeof(std::int64_t)), 8, label_))),
          replay_(checked_address(*mapping_, control, sizeof(ReplayControl), alignof(ReplayControl), label_),
                  checked_address(*mapping_, stored, stored_bytes(capacity), alignof(Word), label_),
                  checked_address(*mapping_, rows, bytes_of(capacity, stride), alignof(RowHead), label_),
                  tree ? checked_address(*mapping_, *tree, tree_bytes(capacity), 64, label_) : nullptr,
                  {capacity,
                   stride,
                   stream_count > 0,
                   slices(columns_),
                   {std::get<0>(transition), std::get<1>(transition), std::get<2>(transition), std::get<3>(transition)},
                   {std::get<0>(limit), std::get<1>(limit), std::get<2>(limit)}},
                  mapping_->life()),
          add_spin_(default_spin_limit_ns()), sample_spin_(default_spin_limit_ns()) {
        if (capacity < 1 || stride < head_bytes(stream_count > 0) || stride % alignof(RowHead) != 0)
            raise("SegmentError", label_ + " must have rows of at least " + std::to_string(head_bytes(stream_count > 0)) +
                                      " bytes, a multiple of " + std::to_string(alignof(RowHead)) + ", found " +
                                      std::to_string(capacity) + " rows of " + std::to_string(stride) + " bytes");
        const std::size_t payload = stride - head_bytes(stream_count > 0);
        for (const Column &column : columns_)
            if (column.slice.offset > payload || column.slice.bytes > payload - column.slice.offset)
                raise("SegmentError", label_ + ": field " + nb::cast<std::string>(nb::repr(column.name)) +
                                          " ends beyond its row of " + std::to_string(stride) + " bytes");
        const auto &[reward, terminated, truncated, is_double] = transition;
        const auto has_bytes = [&](std::size_t field, std::size_t bytes) {
            return field < columns_.size() && columns_[field].slice.bytes == bytes;
        };
        if (stream_count > 0 && !(has_bytes(reward, is_double ? sizeof(double) : sizeof(float)) &&
                                  has_bytes(terminated, 1) && has_bytes(truncated, 1)))
            raise("SegmentError", label_ + ": reward, terminated and truncated must be fields of 4 or 8, 1 and 1 bytes");
    }

    const std::string &label() const { return label_; }
    Replay &replay() { return replay_; }
    Mapping &mapping() const { return *mapping_; }

    // The fast path for rows without streams. Returns the transitions added; -1, and nothing done, if the caller must
    // use `add_rows` or the limiter would make it wait.
    std::int64_t add_plain(nb::handle rows, nb::handle timeout) {
        seconds_of(timeout);
        require_open_and_writeable();
        InputRows input(columns_, rows, -1, true);
        if (!input.accepted || replay_.shape().linked || input.count > replay_.capacity() ||
            !replay_.admit_inserts(input.count))
            return -1;
        AddRequest request{};
        request.count = input.count;
        request.fields = input.fields;
        return add(request, input.count, input.count);
    }

    // Returns the transitions added; -1, and nothing done, if an argument is not accepted: the caller then checks the
    // arguments in Python and raises the error.
    std::int64_t add_rows(nb::handle rows, std::int64_t version, std::optional<StreamIndices> streams,
                          std::optional<Bytes> skip, nb::handle finals, std::optional<Bytes> has_final, nb::handle timeout,
                          nb::handle peers) {
        require_open_and_writeable();
        InputRows input(columns_, rows, streams ? static_cast<std::int64_t>(streams->shape(0)) : -1, true);
        if (!input.accepted || streams.has_value() != replay_.shape().linked)
            return -1;
        AddRequest request{};
        request.count = input.count;
        request.fields = input.fields;
        request.version = version;
        const auto as_span = [](const std::optional<Bytes> &flags) {
            return flags ? std::span<const std::uint8_t>(flags->data(), flags->shape(0)) : std::span<const std::uint8_t>();
        };
        request.skip = as_span(skip);
        request.has_final = as_span(has_final);
        std::optional<InputRows> final_input;
        if (!finals.is_none()) {
            final_input.emplace(columns_, finals, input.count, false);
            if (!final_input->accepted)
                return -1;
            request.finals = final_input->fields;
            request.final_fields = final_input->field_indices;
        }
        for (const auto &flags : {request.skip, request.has_final})
            if (!flags.empty() && flags.size() != static_cast<std::size_t>(input.count))
                return -1;
        if (streams) {
            request.newest = streams_;
            request.streams = {streams->data(), streams->shape(0)};
            if (first_out_of_range(request.streams, stream_count_) >= 0)
                return -1;
        }
        std::int64_t transitions = input.count, stored = 0;
        for (std::int64_t i = 0; i < input.count; ++i) {
            const bool skipped = !request.skip.empty() && request.skip[static_cast<std::size_t>(i)];
            transitions -= skipped;
            stored += skipped ? 0 : 1 + (!request.has_final.empty() && request.has_final[static_cast<std::size_t>(i)]);
        }
        if (stored > replay_.capacity())
            return -1;
        wait_for_limiter(Side::writers, transitions, timeout, peers);
        return add(request, transitions, stored);
    }

    std::int64_t set_priorities(Indices keys, nb::ndarray<const double, nb::ndim<1>, nb::c_contig, nb::device::cpu> errors) {
        require_open_and_writeable();
        const std::size_t count = keys.shape(0);
        std::vector<float> priorities(count);
        for (std::size_t i = 0; i < count; ++i) {
            if (keys.data()[i] <= 0)
                throw nb::value_error(("keys must be values of a batch's 'key', 1 or more, found " +
                                       std::to_string(keys.data()[i]) + " at position " + std::to_string(i))
                                          .c_str());
            const double error = std::abs(errors.data()[i]);
            if (!std::isfinite(error))
                throw nb::value_error(
                    ("errors must be finite, found " + format_number(errors.data()[i]) + " at position " + std::to_string(i))
                        .c_str());
            const double priority = std::pow(error + smallest_error, alpha_);
            if (priority > largest_priority)
                throw nb::value_error(("the error " + format_number(error) + " at position " + std::to_string(i) +
                                       " is too large for a priority; did the training diverge?")
                                          .c_str());
            priorities[i] = static_cast<float>(std::max(priority, smallest_priority));
        }
        return without_gil_for(count * 256, [&] { return replay_.set_priorities({keys.data(), count}, priorities); });
    }

    // Sets the priority that the first rows of a new replay get to 1.
    void init_priorities() {
        require_open_and_whole();
        float unset = 0;
        replay_.control().priority.highest.compare_exchange_strong(unset, 1.0F, std::memory_order_relaxed);
    }

    double total_priority() {
        require_open_and_whole();
        return replay_.prioritised() ? replay_.tree().total() : 0;
    }

    std::int64_t added() const {
        require_open_and_whole();
        return see(replay_.control().added.value);
    }

    std::int64_t last_sequence() const {
        require_open_and_whole();
        return see(replay_.control().reserved.last);
    }

    std::int64_t size() const {
        require_open_and_whole();
        return replay_.size();
    }

    nb::dict counters() const {
        require_open_and_whole();
        const ReplayControl &control = replay_.control();
        nb::dict counters;
        counters["admitted"] = see(control.admitted.inserts);
        counters["added"] = see(control.added.value);
        counters["sampled"] = see(control.sampled.value);
        counters["evicted"] = see(control.lost.evicted);
        counters["abandoned"] = see(control.lost.abandoned);
        counters["avoided"] = see(control.lost.avoided);
        counters["stale_priorities"] = see(control.lost.stale);
        counters["redrawn"] = see(control.drawn.redrawn);
        counters["held_writers"] = see(control.admitted.held_writers);
        counters["held_samplers"] = see(control.admitted.held_samplers);
        return counters;
    }

    void wait_for_samples(std::int64_t count, nb::handle timeout, nb::handle peers) {
        wait_for_limiter(Side::samplers, count, timeout, peers);
    }

    // Raises ValueError if batches of this size could make the limiter hold both sides for ever.
    void require_error_buffer(std::int64_t insert, std::int64_t sample) const {
        if (replay_.shape().limit.ratio > 0)
            require_error_buffer(replay_.required_error_buffer(insert, sample));
    }

    std::int64_t save_into(ReplayHandle &copy) {
        const TruncationGuard guard(*copy.mapping_); // beside that of this mapping
        require_open_and_whole();
        copy.require_open_and_writeable();
        if (copy.replay_.capacity() != replay_.capacity() ||
            copy.replay_.shape().stride_bytes != replay_.shape().stride_bytes ||
            copy.replay_.prioritised() != replay_.prioritised())
            raise("SegmentError",
                  copy.label_ + " and " + label_ + " must have the same capacity, row size and kind of priorities");
        std::int64_t changed = 0;
        for_all_slots([&](std::int64_t begin, std::int64_t end) {
            changed += replay_.save_rows(copy.replay_, begin, end);
            return !copy.mapping_->truncated();
        });
        require_whole(*copy.mapping_, copy.label_);
        without_gil([&] { replay_.save_counters(copy.replay_); });
        require_whole(*copy.mapping_, copy.label_);
        return changed;
    }

    bool counters_plausible() const {
        require_open_and_whole();
        return replay_.counters_plausible();
    }

    std::int64_t first_implausible() const {
        require_open_and_whole();
        std::int64_t slot = -1;
        for_all_slots([&](std::int64_t begin, std::int64_t end) {
            slot = replay_.first_implausible(begin, end);
            return slot < 0;
        });
        return slot;
    }

    // Recomputes all sums of the priorities. A file may have any.
    void refresh_priorities() {
        require_open_and_writeable();
        if (replay_.prioritised())
            without_gil([&] { replay_.tree().refresh_all(); });
    }

  private:
    // Calls work(begin, end) for all slots, a few megabytes at a time and without the GIL, until it returns false. Signal
    // handlers run in between: 4 GB of a sparse file take 10 s, which Ctrl-C must end.
    template <class Work> void for_all_slots(Work work) const {
        const auto step = static_cast<std::int64_t>(std::max<std::size_t>(1, (8 << 20) / replay_.shape().stride_bytes));
        for (std::int64_t begin = 0; begin < replay_.capacity(); begin += step) {
            if (!without_gil([&] { return work(begin, std::min(begin + step, replay_.capacity())); }))
                return;
            if (PyErr_CheckSignals() != 0)
                throw nb::python_error();
            require_open_and_whole();
        }
    }

    static constexpr double smallest_error = 1e-6; // added to each error: a row with error 0 is still drawn sometimes
    // Bounds that keep each priority, and the sum of all of them, within the range of a float.
    static constexpr double smallest_priority = 1e-30, largest_priority = 1e28;

    void require_open_and_whole() const {
        require_open(*mapping_, label_);
        require_end(*mapping_, label_);
    }
    void require_open_and_writeable() const {
        require_open_and_whole();
        require_writeable(*mapping_, label_);
    }

    std::int64_t add(const AddRequest &request, std::int64_t transitions, std::int64_t stored) {
        const std::size_t bytes = static_cast<std::size_t>(stored) * replay_.shape().stride_bytes;
        process_in(*mapping_, label_); // `add` needs it, and cannot raise a Python error
        const MappingUse use(*mapping_);
        std::int64_t added = 0;
        try {
            added = without_gil_for(bytes, [&] { return replay_.add(request); });
        } catch (const ReplayDamaged &damage) {
            raise("SegmentError", label_ + " is damaged: " + damage.what() + "; restore it from a copy");
        }
        if (added < transitions && replay_.shape().limit.ratio > 0)
            replay_.control().admitted.inserts.fetch_sub(transitions - added, std::memory_order_relaxed);
        if (added < transitions)
            raise("MemlaneError", "all " + std::to_string(replay_.capacity()) + " rows of the " + label_ +
                                      " are held by other live writers; " + std::to_string(added) + " of " +
                                      std::to_string(transitions) + " rows were added; create it with a larger capacity");
        return added;
    }

    // The bytes of `count` equal parts. More than a mapping can have if the count is negative or the product too large:
    // checked_address then refuses it.
    static std::size_t bytes_of(std::int64_t count, std::size_t each) {
        constexpr auto max = static_cast<std::size_t>(-1);
        return count < 0 || (each > 0 && static_cast<std::size_t>(count) > max / each)
                   ? max
                   : static_cast<std::size_t>(count) * each;
    }
    static std::size_t stored_bytes(std::int64_t capacity) {
        return capacity < 0 ? static_cast<std::size_t>(-1) : Replay::stored_bytes(capacity);
    }
    // A leaf has 8 bytes, so a tree has at most as many leaves as bytes.
    std::size_t tree_bytes(std::int64_t capacity) const {
        const bool fits = capacity >= 1 && static_cast<std::size_t>(capacity) <= mapping_->bytes() / sizeof(Word);
        return fits ? SumTree::bytes(capacity) : static_cast<std::size_t>(-1);
    }

    static std::vector<FieldSlice> slices(const std::vector<Column> &columns) {
        std::vector<FieldSlice> slices;
        for (const Column &column : columns)
            slices.push_back(column.slice);
        return slices;
    }

    void require_error_buffer(double required) const {
        const double error_buffer = replay_.shape().limit.error_buffer;
        if (required > error_buffer)
            throw nb::value_error(("the limiter of the " + label_ +
                                   " would make writers and samplers wait for each other for ever: "
                                   "batches of this size need an error_buffer of at least " +
                                   format_number(required) + ", found " + format_number(error_buffer) +
                                   "; use smaller batches, or create the replay with a larger error_buffer")
                                      .c_str());
    }
    static std::string format_number(double number) { return nb::cast<std::string>(nb::str("{:g}").attr("format")(number)); }

    // Waits until the limiter admits `count` transitions or samples.
    void wait_for_limiter(Side side, std::int64_t count, nb::handle timeout_argument, nb::handle peers) {
        const std::optional<double> timeout = seconds_of(timeout_argument);
        if (replay_.admit(side, count))
            return;
        const bool adds = side == Side::writers;
        require_error_buffer(adds ? replay_.required_error_buffer(count, 0) : replay_.required_error_buffer(0, count));
        replay_.count_held(side);
        wait_in_slices(
            *mapping_, label_, timeout, peers, adds ? add_spin_ : sample_spin_,
            [&](std::int64_t deadline_ns, std::span<const int> pidfds, Spin &spin) {
                return replay_.wait_admitted(side, count, deadline_ns, pidfds, spin);
            },
            [&] {
                const ReplayControl &control = replay_.control();
                return "the limiter of the " + label_ + " to admit " + std::to_string(count) +
                       (adds ? " rows to add" : " rows to sample") + "; " + std::to_string(see(control.admitted.inserts)) +
                       " were added and " + std::to_string(see(control.admitted.samples)) + " sampled, for a ratio of " +
                       format_number(replay_.shape().limit.ratio) + " samples per insert after the first " +
                       std::to_string(replay_.shape().limit.min_size);
            });
    }

    std::shared_ptr<Mapping> mapping_;
    std::string label_;
    std::vector<Column> columns_;
    double alpha_;
    std::int64_t stream_count_;
    std::int64_t *streams_;
    Replay replay_;
    Spin add_spin_;
    Spin sample_spin_;
};

class SamplerHandle {
  public:
    using CopyTuple = std::tuple<std::size_t, std::size_t, std::size_t, int, bool>; // the members of FieldCopy

    SamplerHandle(std::shared_ptr<ReplayHandle> replay, std::size_t rng, std::optional<std::uint64_t> seed,
                  const std::vector<CopyTuple> &copies, std::size_t row_bytes, int steps, double gamma, int length,
                  const std::vector<std::int64_t> &offsets)
        : replay_(std::move(replay)),
          sampler_(replay_->replay(), make_spec(copies, row_bytes, steps, gamma, length, offsets, replay_->replay().shape()),
                   *reinterpret_cast<Rng *>(checked_address(mapping(), rng, sizeof(Rng), 64, label()))),
          prefetcher_(replay_->replay(), sampler_, &mapping()) {
        const TruncationGuard guard(mapping());
        require_open(mapping(), label());
        require_end(mapping(), label());
        if (seed)
            reinterpret_cast<Rng *>(mapping().data() + rng)->seed(*seed);
        require_whole(mapping(), label());
    }

    const std::string &label() const { return replay_->label(); }
    Mapping &mapping() const { return replay_->mapping(); }

    using Block = nb::ndarray<std::uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

    // Draws as many rows as the block has.
    void sample(Block block, double beta, int threads, nb::handle timeout, nb::handle peers) {
        const std::int64_t count = checked_count(block);
        require_not_stopping();
        if (prefetcher_.requested() > 0)
            raise("MemlaneError",
                  "this sampler of the " + replay_->label() +
                      " is used by a ReplayPipeline; consume the batches that were started, or create another sampler");
        if (busy_.test_and_set(std::memory_order_acquire)) // PAIR none: the GIL orders threads of one process
            raise_used_by_another_thread();
        const struct Idle {
            std::atomic_flag &busy;
            ~Idle() { busy.clear(std::memory_order_release); }
        } idle{busy_};
        replay_->wait_for_samples(count, timeout, peers);
        auto *out = reinterpret_cast<std::byte *>(block.data());
        bool drawn = false;
        try {
            drawn = without_gil_for(block.nbytes(), [&] { return sampler_.sample(count, out, beta, threads); });
        } catch (...) {
            replay_->replay().refund_samples(count);
            throw;
        }
        if (!drawn) {
            replay_->replay().refund_samples(count);
            raise_nothing_to_sample();
        }
        signal_add(replay_->replay().control().sampled, count);
    }

    // Draws into the block in the background thread. The block is kept alive until it is taken.
    void start(Block block, double beta, int threads) {
        const std::int64_t count = checked_count(block);
        require_not_stopping();
        if (busy_.test(std::memory_order_relaxed)) // a thread is sampling without the GIL
            raise_used_by_another_thread();
        replay_->require_error_buffer(0, count);
        if (prefetcher_.requested() == 0)
            blocks_.clear(); // blocks of the parent of a forked child: no thread draws into them here
        prefetcher_.request(count, reinterpret_cast<std::byte *>(block.data()), beta, threads);
        blocks_.push_back(block);
    }

    bool ready() const { return prefetcher_.oldest() != BatchStatus::pending; }

    // The number of batches that were started and not taken.
    std::size_t started() const { return prefetcher_.requested(); }

    // Waits for the batch that was started first and removes it. False at the timeout, or if another thread called
    // `stop`.
    bool take(nb::handle timeout) {
        const std::int64_t deadline_ns = deadline_ns_of(seconds_of(timeout));
        BatchStatus status;
        while ((status = prefetcher_.oldest()) == BatchStatus::pending) {
            const std::shared_ptr<BatchPrefetcher::Shared> shared = prefetcher_.shared();
            if (!shared || now_ns() >= deadline_ns)
                return false;
            without_gil([&] { BatchPrefetcher::wait(*shared, std::min(deadline_ns, now_ns() + slice_ns)); });
            if (PyErr_CheckSignals() != 0)
                throw nb::python_error();
            require_open(mapping(), label());
        }
        const std::exception_ptr error = prefetcher_.take();
        blocks_.pop_front();
        if (error) { // memory or threads ran out
            try {
                std::rethrow_exception(error);
            } catch (const std::exception &failure) {
                PyErr_Format(PyExc_MemoryError, "a batch of the %s could not be drawn: %s", replay_->label().c_str(),
                             failure.what());
                throw nb::python_error();
            }
        }
        if (status == BatchStatus::nothing_to_sample)
            raise_nothing_to_sample();
        return true;
    }

    // Ends the background thread; batches that are not drawn yet stay undrawn.
    void stop() {
        const std::shared_ptr<BatchPrefetcher::Shared> shared = prefetcher_.detach();
        ++stopping_;
        without_gil([&] { BatchPrefetcher::stop(shared.get()); });
        if (--stopping_ == 0)
            blocks_.clear();
    }

  private:
    [[noreturn]] void raise_used_by_another_thread() const {
        raise("MemlaneError",
              "this sampler of the " + replay_->label() + " is used by another thread; create a sampler for each thread");
    }

    // Other Python threads run while `stop` joins the background thread.
    void require_not_stopping() const {
        if (stopping_ > 0)
            raise("MemlaneError",
                  "this sampler of the " + replay_->label() + " is being stopped by another thread; create another sampler");
    }

    std::int64_t checked_count(const Block &block) const {
        require_open(mapping(), label());
        require_end(mapping(), label());
        require_writeable(mapping(), label());
        const auto rows = static_cast<std::int64_t>(block.shape(0));
        const SampleSpec &spec = sampler_.spec();
        if (block.shape(1) != spec.row_bytes || rows == 0 || rows % spec.length != 0)
            throw nb::value_error(("block must have a multiple of " + std::to_string(spec.length) + " rows of " +
                                   std::to_string(spec.row_bytes) + " bytes, found shape [" + std::to_string(rows) + ", " +
                                   std::to_string(block.shape(1)) + "]")
                                      .c_str());
        return rows / spec.length;
    }

    [[noreturn]] void raise_nothing_to_sample() const {
        raise("NothingToSample",
              "no row of the " + replay_->label() + " can be drawn: " + std::to_string(replay_->size()) +
                  " transitions are stored" +
                  (replay_->size() > 0 ? ", but none has the neighbours that this sampler needs (a row of a "
                                         "stream needs the one after it); add more"
                                       : "; add some first"));
    }

    // `offsets` are those of SampleSpec, in the order of its members.
    static SampleSpec make_spec(const std::vector<CopyTuple> &copies, std::size_t row_bytes, int steps, double gamma,
                                int length, const std::vector<std::int64_t> &offsets, const Replay::Shape &shape) {
        SampleSpec spec;
        spec.row_bytes = row_bytes;
        for (const auto &[from, bytes, to, stack, from_next] : copies) {
            const std::size_t payload = shape.stride_bytes - head_bytes(shape.linked);
            if (from > payload || bytes > payload - from || stack < 1 || to > row_bytes ||
                (bytes > 0 && static_cast<std::size_t>(stack) > (row_bytes - to) / bytes))
                throw nb::value_error(("cannot copy " + std::to_string(bytes) + " bytes at " + std::to_string(from) +
                                       " of a row to " + std::to_string(to) + " of a batch row, stacked " +
                                       std::to_string(stack) + " times: a row has " + std::to_string(payload) +
                                       " bytes, a batch row " + std::to_string(row_bytes))
                                          .c_str());
            spec.copies.push_back({from, bytes, to, stack, from_next});
        }
        spec.steps = steps;
        spec.gamma = gamma;
        spec.length = length;
        std::int64_t *const members[] = {&spec.reward, &spec.terminated, &spec.truncated, &spec.discount, &spec.horizon,
                                         &spec.key,    &spec.version,    &spec.weight,    &spec.valid};
        if (offsets.size() != std::size(members) || length < 1)
            throw nb::value_error(("expected 9 offsets and a length of 1 or more, found " + std::to_string(offsets.size()) +
                                   " offsets and length " + std::to_string(length))
                                      .c_str());
        const std::size_t sizes[] = {
            shape.transition.reward_is_double ? sizeof(double) : sizeof(float), 1, 1, 4, 4, 8, 8, 4, 1};
        for (std::size_t i = 0; i < offsets.size(); ++i) {
            if (offsets[i] >= 0 && (sizes[i] > row_bytes || static_cast<std::size_t>(offsets[i]) > row_bytes - sizes[i]))
                throw nb::value_error(("offsets[" + std::to_string(i) + "] is " + std::to_string(offsets[i]) +
                                       ", outside of a batch row of " + std::to_string(row_bytes) + " bytes")
                                          .c_str());
            *members[i] = offsets[i];
        }
        return spec;
    }

    std::shared_ptr<ReplayHandle> replay_;
    Sampler sampler_;
    std::atomic_flag busy_ = ATOMIC_FLAG_INIT;
    int stopping_ = 0;           // threads in `stop`
    std::deque<Block> blocks_;   // the background thread draws into these
    BatchPrefetcher prefetcher_; // last: its thread must end before the members that it uses are destroyed
};

} // namespace

void bind_replay(nb::module_ &m) {
    bind_block_pool(m);
    m.attr("REPLAY_CONTROL_BYTES") = sizeof(ReplayControl);
    m.def("row_head_bytes", &head_bytes, "linked"_a, "Return the bytes before the fields of each row.");
    m.def("sum_tree_bytes", &SumTree::bytes, "count"_a,
          "Return the bytes of a sum tree for the priorities of `count` rows.");

    nb::class_<ReplayHandle>(m, "Replay", "A replay buffer: rows that writers add into a circular table and samplers draw.")
        .def(nb::init<std::shared_ptr<Mapping>, std::size_t, std::size_t, std::size_t, std::optional<std::size_t>,
                      std::size_t, std::int64_t, std::int64_t, std::size_t, const std::vector<Column::Tuple> &,
                      std::tuple<std::size_t, std::size_t, std::size_t, bool>, std::tuple<double, std::int64_t, double>,
                      double, std::string>(),
             "mapping"_a, "control"_a, "stored"_a, "rows"_a, "tree"_a.none(), "streams"_a, "stream_count"_a, "capacity"_a,
             "stride"_a, "columns"_a, "transition"_a, "limit"_a, "alpha"_a, "label"_a)
        .def_prop_ro("label", &ReplayHandle::label)
        .def("add_plain", guarded(&ReplayHandle::add_plain), "rows"_a.none(), "timeout"_a.none(),
             "Add rows without streams and return how many were added; -1 if the caller must use `add`.")
        .def("add", guarded(&ReplayHandle::add_rows), "rows"_a.none(), "version"_a, "streams"_a.none(), "skip"_a.none(),
             "finals"_a.none(), "has_final"_a.none(), "timeout"_a.none(), "peers"_a,
             "Add rows and return how many transitions were added; -1 if an argument is not accepted.")
        .def("set_priorities", guarded(&ReplayHandle::set_priorities), "keys"_a, "errors"_a,
             "Set the priorities of rows by their keys and return how many of the rows were still stored.")
        .def("init_priorities", guarded(&ReplayHandle::init_priorities),
             "Set the priority of the first rows of a new replay.")
        .def("total_priority", guarded(&ReplayHandle::total_priority))
        .def("added", guarded(&ReplayHandle::added), "Return the number of transitions added since the replay was created.")
        .def("last_sequence", guarded(&ReplayHandle::last_sequence),
             "Return the last sequence number that was reserved; final observations have sequence numbers, too.")
        .def("size", guarded(&ReplayHandle::size), "Return the number of stored transitions.")
        .def("counters", guarded(&ReplayHandle::counters))
        .def("save_into", guarded(&ReplayHandle::save_into), "copy"_a,
             "Bring `copy` up to date and return how many rows had changed.")
        .def("counters_plausible", guarded(&ReplayHandle::counters_plausible),
             "Return whether writers and samplers could have left these counters.")
        .def("first_implausible", guarded(&ReplayHandle::first_implausible),
             "Return the first slot with contents that no writer leaves, or -1.")
        .def("refresh_priorities", guarded(&ReplayHandle::refresh_priorities), "Recompute all sums of the priorities.");

    nb::class_<SamplerHandle>(
        m, "Sampler", "Draws rows of a replay into a block, in the calling thread or ahead of time in a background thread.")
        .def(nb::init<std::shared_ptr<ReplayHandle>, std::size_t, std::optional<std::uint64_t>,
                      const std::vector<SamplerHandle::CopyTuple> &, std::size_t, int, double, int,
                      const std::vector<std::int64_t> &>(),
             "replay"_a, "rng"_a, "seed"_a.none(), "copies"_a, "row_bytes"_a, "steps"_a, "gamma"_a, "length"_a, "offsets"_a)
        .def("sample", guarded(&SamplerHandle::sample), "block"_a, "beta"_a, "threads"_a, "timeout"_a.none(), "peers"_a,
             "Draw as many rows as the block has.")
        .def("start", guarded(&SamplerHandle::start), "block"_a, "beta"_a, "threads"_a,
             "Begin to draw into the block in a background thread.")
        .def("ready", &SamplerHandle::ready, "Return whether the batch that was started first is finished.")
        .def("take", guarded(&SamplerHandle::take), "timeout"_a.none(),
             "Wait for the batch that was started first and remove it. False at the timeout, or after `stop`.")
        .def("started", &SamplerHandle::started, "Return how many batches were started and not taken.")
        .def("stop", &SamplerHandle::stop, "End the background thread; batches that are not drawn yet stay undrawn.");
}
