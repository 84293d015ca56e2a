// The Python face of the replay: rows come in as a dict of arrays and go out as rows of one block.

#include <algorithm>
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

#include "python/module.hpp"
#include "python/waits.hpp"
#include "python/numpy_arrays.hpp"
#include "lanes/batch_prefetcher.hpp"
#include "lanes/replay.hpp"
#include "lanes/sampler.hpp"

using namespace nb::literals;
using namespace memlane;

namespace {

using Bytes = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Numbers = nb::ndarray<std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// What a field of a row is called, and what an array of it looks like.
struct Column {
    using Given = std::tuple<nb::object, std::size_t, std::size_t, nb::object, std::vector<npy_intp>>;

    nb::object name;
    FieldPlace place;
    nb::object dtype;
    std::vector<npy_intp> shape;

    explicit Column(const Given &given)
        : name(std::get<0>(given)), place{std::get<1>(given), std::get<2>(given)}, dtype(std::get<3>(given)),
          shape(std::get<4>(given)) {}
};

PyObject *dtype_of(const char *name) { return nb::module_::import_("numpy").attr("dtype")(name).release().ptr(); }

// The rows of one `add`, seen in place or, where they are Python numbers or of double width, converted. Memory for up to a
// dozen fields is on the stack: what this does is most of the time that one row takes.
class Arrivals {
  public:
    Arrivals(const std::vector<Column> &columns, nb::handle rows, std::int64_t expected, bool all) {
        good = PyDict_CheckExact(rows.ptr()) && (!all || static_cast<std::size_t>(PyDict_GET_SIZE(rows.ptr())) == columns.size());
        if (!good)
            return;
        fields.reserve(columns.size());
        held_.reserve(columns.size());
        which.reserve(columns.size());
        for (std::size_t k = 0; k < columns.size() && good; ++k) {
            PyObject *value = PyDict_GetItemWithError(rows.ptr(), columns[k].name.ptr());
            if (value == nullptr) {
                if (PyErr_Occurred())
                    throw nb::python_error();
                good = !all;
                continue;
            }
            which.push_back(k);
            good = take(columns[k], value, expected);
        }
        good = good && count >= 0 && (all || which.size() == static_cast<std::size_t>(PyDict_GET_SIZE(rows.ptr())));
    }

  private:
    alignas(16) std::byte stack_[1024];
    std::pmr::monotonic_buffer_resource memory_{stack_, sizeof stack_};
    std::pmr::vector<nb::object> held_{&memory_};

  public:
    bool good;
    std::int64_t count = -1;
    std::pmr::vector<Field> fields{&memory_};
    std::pmr::vector<std::size_t> which{&memory_};

  private:
    bool counts(std::int64_t rows, std::int64_t expected) {
        if (count < 0)
            count = rows;
        return count == rows && (expected < 0 || rows == expected);
    }
    template <class T> void keep(T value) {
        auto *to = static_cast<std::byte *>(memory_.allocate(sizeof value));
        std::memcpy(to, &value, sizeof value);
        fields.push_back({to, sizeof value, sizeof value});
    }
    // As floats. False if one that is finite would become infinite: which one, and in which field, is said the long way.
    static bool narrow(std::span<const double> from, float *to) {
        std::ranges::transform(from, to, [](double number) { return static_cast<float>(number); });
        // As whole numbers, where inf and nan are the largest: that is done four at a time, and takes a fifth of the time.
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
    bool take(const Column &column, PyObject *value, std::int64_t expected) {
        static PyObject *const single = dtype_of("float32"), *const twice = dtype_of("float64"), *const flag = dtype_of("bool");
        const std::size_t bytes = column.place.bytes;
        PyObject *const dtype = column.dtype.ptr();
        PlainArray array;
        if (PlainArray::see(value, array)) {
            const bool many = array.shape.size() == column.shape.size() + 1;
            if (!std::ranges::equal(column.shape, array.shape.subspan(many ? 1 : 0)))
                return false;
            const std::int64_t rows = many ? array.shape[0] : 1;
            if (array.dtype != dtype) {
                // The one conversion that everybody needs: environments give rewards in double width.
                if (array.dtype != twice || dtype != single)
                    return false;
                const std::size_t numbers = static_cast<std::size_t>(rows) * bytes / sizeof(float);
                const auto *from = reinterpret_cast<const double *>(array.data);
                array.data = static_cast<std::byte *>(memory_.allocate(numbers * sizeof(float)));
                if (!narrow({from, numbers}, reinterpret_cast<float *>(array.data)))
                    return false;
            }
            held_.push_back(nb::borrow(value)); // another thread may empty the dict while this one copies
            fields.push_back({array.data, bytes, bytes});
            return counts(rows, expected);
        }
        if (!column.shape.empty())
            return false;
        if (PyFloat_Check(value) && dtype == single) {
            const double number = PyFloat_AS_DOUBLE(value);
            float narrowed;
            if (!narrow({&number, 1}, &narrowed))
                return false;
            keep(narrowed);
        } else if (PyFloat_Check(value) && dtype == twice)
            keep(PyFloat_AS_DOUBLE(value));
        else if (PyBool_Check(value) && dtype == flag)
            keep(value == Py_True);
        else
            return false;
        return counts(1, expected);
    }
};

class ReplayHandle {
  public:
    ReplayHandle(std::shared_ptr<Mapping> mapping, std::size_t control, std::size_t rows, std::optional<std::size_t> tree,
                 std::size_t streams, std::int64_t stream_count, std::int64_t capacity, std::size_t stride,
                 const std::vector<Column::Given> &columns, std::tuple<std::size_t, std::size_t, std::size_t, bool> transition,
                 std::tuple<double, std::int64_t, double> limit, double alpha, std::string label)
        : mapping_(std::move(mapping)), label_(std::move(label)), columns_(columns.begin(), columns.end()), alpha_(alpha),
          stream_count_(stream_count),
          streams_(reinterpret_cast<std::int64_t *>(
              place(*mapping_, streams, static_cast<std::size_t>(stream_count) * sizeof(std::int64_t), 8, label_))),
          replay_(place(*mapping_, control, sizeof(ReplayControl), alignof(ReplayControl), label_),
                  place(*mapping_, rows, static_cast<std::size_t>(capacity) * stride, alignof(RowHead), label_),
                  tree ? place(*mapping_, *tree, SumTree::bytes(capacity), 64, label_) : nullptr,
                  {capacity, stride, stream_count > 0, places(columns_),
                   {std::get<0>(transition), std::get<1>(transition), std::get<2>(transition), std::get<3>(transition)},
                   {std::get<0>(limit), std::get<1>(limit), std::get<2>(limit)}}),
          add_spin_(default_spin_limit_ns()), sample_spin_(default_spin_limit_ns()) {
        for (const Column &column : columns_)
            if (head_bytes(stream_count > 0) + column.place.offset + column.place.bytes > stride)
                raise("SegmentError", label_ + ": a field ends beyond its row");
    }

    const std::string &label() const { return label_; }
    Replay &replay() { return replay_; }
    const std::shared_ptr<Mapping> &mapping() const { return mapping_; }

    // The shortest way, for rows without links: the transitions added, or -1 if it must be the long way.
    std::int64_t add_plain(nb::handle rows) {
        require_writeable_and_open();
        Arrivals arrivals(columns_, rows, -1, true);
        if (!arrivals.good || replay_.shape().linked || arrivals.count > replay_.capacity() ||
            !replay_.admit_inserts(arrivals.count))
            return -1;
        Addition addition{};
        addition.count = arrivals.count;
        addition.fields = arrivals.fields;
        return add(addition, arrivals.count, arrivals.count);
    }

    // The transitions added; -1 if an argument is not as it must be, which the caller then says in words.
    std::int64_t add_rows(nb::handle rows, std::int64_t version, std::optional<Numbers> streams, std::optional<Bytes> skip,
                          nb::handle finals, std::optional<Bytes> has_final, std::optional<double> timeout, nb::handle peers) {
        require_writeable_and_open();
        Arrivals arrivals(columns_, rows, streams ? static_cast<std::int64_t>(streams->shape(0)) : -1, true);
        if (!arrivals.good || streams.has_value() != replay_.shape().linked)
            return -1;
        Addition addition{};
        addition.count = arrivals.count;
        addition.fields = arrivals.fields;
        addition.version = version;
        const auto per_row = [&](const std::optional<Bytes> &given) {
            return given ? std::span<const std::uint8_t>(given->data(), given->shape(0)) : std::span<const std::uint8_t>();
        };
        addition.skip = per_row(skip);
        addition.has_final = per_row(has_final);
        std::optional<Arrivals> last;
        if (!finals.is_none()) {
            last.emplace(columns_, finals, arrivals.count, false);
            if (!last->good)
                return -1;
            addition.finals = last->fields;
            addition.final_fields = last->which;
        }
        for (const auto &given : {addition.skip, addition.has_final})
            if (!given.empty() && given.size() != static_cast<std::size_t>(arrivals.count))
                return -1;
        if (streams) {
            addition.newest = streams_;
            addition.streams = {streams->data(), streams->shape(0)};
            if (first_out_of_range(addition.streams, stream_count_) >= 0)
                return -1;
        }
        std::int64_t transitions = arrivals.count, stored = 0;
        for (std::int64_t i = 0; i < arrivals.count; ++i) {
            const bool skipped = !addition.skip.empty() && addition.skip[static_cast<std::size_t>(i)];
            transitions -= skipped;
            stored += skipped ? 0 : 1 + (!addition.has_final.empty() && addition.has_final[static_cast<std::size_t>(i)]);
        }
        if (stored > replay_.capacity())
            return -1;
        hold_back(Side::writers, transitions, timeout, peers);
        return add(addition, transitions, stored);
    }

    std::int64_t set_priorities(Indices keys, nb::ndarray<const double, nb::ndim<1>, nb::c_contig, nb::device::cpu> errors) {
        require_writeable_and_open();
        const std::size_t count = keys.shape(0);
        std::vector<float> priorities(count);
        for (std::size_t i = 0; i < count; ++i) {
            if (keys.data()[i] <= 0)
                throw nb::value_error(("keys are what a sample gave under 'key', 1 or more; found " +
                                       std::to_string(keys.data()[i]) + " at position " + std::to_string(i)).c_str());
            const double error = std::abs(errors.data()[i]);
            if (!std::isfinite(error))
                throw nb::value_error(("priorities must be finite, found " + std::to_string(errors.data()[i]) + " at position " +
                                       std::to_string(i)).c_str());
            const double priority = std::pow(error + smallest_error, alpha_);
            if (priority > largest_priority)
                throw nb::value_error(("an error of " + std::to_string(error) + " at position " + std::to_string(i) +
                                       " is too large for a priority; did the training diverge?").c_str());
            priorities[i] = static_cast<float>(std::max(priority, smallest_priority));
        }
        return without_gil_for(count * 256, [&] { return replay_.set_priorities({keys.data(), count}, priorities); });
    }

    // Of a new replay: what rows get that nobody has learned from yet.
    void begin_priorities() {
        require_open(*mapping_, label_);
        float none = 0;
        replay_.control().priority.highest.compare_exchange_strong(none, 1.0F, std::memory_order_relaxed);
    }

    double total_priority() {
        require_open(*mapping_, label_);
        return replay_.prioritised() ? replay_.tree().total() : 0;
    }

    std::int64_t added() const {
        require_open(*mapping_, label_);
        return see(replay_.control().added.value);
    }

    std::int64_t last_number() const {
        require_open(*mapping_, label_);
        return see(replay_.control().reserved.last);
    }

    std::int64_t size() const {
        require_open(*mapping_, label_);
        return replay_.size();
    }

    nb::dict counters() const {
        require_open(*mapping_, label_);
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

    void wait_for_samples(std::int64_t count, std::optional<double> timeout, nb::handle peers) {
        hold_back(Side::samplers, count, timeout, peers);
    }

    void require_slack(std::int64_t insert, std::int64_t sample) const {
        if (replay_.shape().limit.ratio > 0)
            require_slack(replay_.slack_needed(insert, sample));
    }

    std::int64_t save_into(ReplayHandle &copy) {
        require_open(*mapping_, label_);
        require_open(*copy.mapping_, copy.label_);
        require_writeable(*copy.mapping_, copy.label_);
        if (copy.replay_.capacity() != replay_.capacity() || copy.replay_.shape().stride_bytes != replay_.shape().stride_bytes ||
            copy.replay_.prioritised() != replay_.prioritised())
            raise("SegmentError", copy.label_ + " has not the shape of " + label_);
        return without_gil([&] { return replay_.save_into(copy.replay_); });
    }

    bool counters_plausible() const {
        require_open(*mapping_, label_);
        return replay_.counters_plausible();
    }

    std::int64_t first_implausible() const {
        require_open(*mapping_, label_);
        return without_gil([&] { return replay_.first_implausible(); });
    }

  private:
    static constexpr double smallest_error = 1e-6; // a row whose error was 0 is still drawn now and then
    // So that neither one priority nor the sum of all of them leaves what a float can hold.
    static constexpr double smallest_priority = 1e-30, largest_priority = 1e28;

    void require_writeable_and_open() const {
        require_open(*mapping_, label_);
        require_writeable(*mapping_, label_);
    }

    std::int64_t add(const Addition &addition, std::int64_t transitions, std::int64_t stored) {
        const std::size_t bytes = static_cast<std::size_t>(stored) * replay_.shape().stride_bytes;
        const std::int64_t added = without_gil_for(bytes, [&] { return replay_.add(addition); });
        if (added < transitions && replay_.shape().limit.ratio > 0)
            replay_.control().admitted.inserts.fetch_sub(transitions - added, std::memory_order_relaxed);
        if (added < transitions)
            raise("MemlaneError", "all " + std::to_string(replay_.capacity()) + " rows of the " + label_ +
                                      " are held by other writers that live; " + std::to_string(added) + " of " +
                                      std::to_string(transitions) + " rows were added; make it larger");
        return added;
    }

    static std::vector<FieldPlace> places(const std::vector<Column> &columns) {
        std::vector<FieldPlace> places;
        for (const Column &column : columns)
            places.push_back(column.place);
        return places;
    }

    void require_slack(double needed) const {
        const double slack = replay_.shape().limit.slack;
        if (needed > slack)
            throw nb::value_error(("the limiter of the " + label_ + " would hold back both sides for ever: batches of this size "
                                   "need an error_buffer of at least " + shown(needed) + ", found " + shown(slack)).c_str());
    }
    static std::string shown(double number) { return nb::cast<std::string>(nb::str("{:g}").attr("format")(number)); }

    // Waits until the limiter lets so many pass.
    void hold_back(Side side, std::int64_t count, std::optional<double> timeout, nb::handle peers) {
        if (replay_.admit(side, count))
            return;
        const bool adds = side == Side::writers;
        require_slack(adds ? replay_.slack_needed(count, 0) : replay_.slack_needed(0, count));
        replay_.count_held(side);
        wait_in_slices(
            *mapping_, label_, timeout, peers, adds ? add_spin_ : sample_spin_,
            [&](std::int64_t deadline_ns, std::span<const int> pidfds, Spin &spin) {
                return replay_.wait_for_leave(side, count, deadline_ns, pidfds, spin);
            },
            [&] {
                const ReplayControl &control = replay_.control();
                return std::string("leave to ") + (adds ? "add " : "sample ") + std::to_string(count) +
                       " rows from the limiter of the " + label_ + ": " +
                       std::to_string(see(control.admitted.inserts)) + " were added and " +
                       std::to_string(see(control.admitted.samples)) + " sampled, for a ratio of " +
                       shown(replay_.shape().limit.ratio) + " after the first " +
                       std::to_string(replay_.shape().limit.least);
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
    using Taken = std::tuple<std::size_t, std::size_t, std::size_t, int, bool>;

    SamplerHandle(std::shared_ptr<ReplayHandle> replay, std::size_t dice, std::optional<std::uint64_t> seed,
                  const std::vector<Taken> &takes, std::size_t row_bytes, int steps, double gamma, int length,
                  const std::vector<std::int64_t> &places)
        : replay_(std::move(replay)),
          sampler_(replay_->replay(), wish(takes, row_bytes, steps, gamma, length, places, replay_->replay().shape()),
                   *reinterpret_cast<Rng *>(place(*replay_->mapping(), dice, sizeof(Rng), 64, replay_->label()))),
          dice_(reinterpret_cast<Rng *>(replay_->mapping()->data() + dice)), drawer_(replay_->replay(), sampler_) {
        if (seed)
            dice_->seed(*seed);
    }

    using Block = nb::ndarray<std::uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

    // Into a block of as many rows as it has.
    void sample(Block block, double beta, int threads, std::optional<double> timeout, nb::handle peers) {
        const std::int64_t count = count_of(block);
        require_not_ending();
        if (drawer_.asked() > 0)
            raise("MemlaneError", "this sampler of the " + replay_->label() + " is drawing ahead; take what was started first");
        if (busy_.test_and_set(std::memory_order_acquire)) // PAIR none: between threads of one process, that of the GIL
            in_another_thread();
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
            nothing_to_sample();
        }
        signal_add(replay_->replay().control().sampled, count);
    }

    // The same in the drawer's thread. The block is kept until it is taken.
    void start(Block block, double beta, int threads) {
        const std::int64_t count = count_of(block);
        require_not_ending();
        if (busy_.test(std::memory_order_relaxed)) // by a thread that draws without the GIL
            in_another_thread();
        replay_->require_slack(0, count);
        if (drawer_.asked() == 0)
            blocks_.clear(); // of a parent that forked this process: its thread is not here to draw into them
        drawer_.ask(count, reinterpret_cast<std::byte *>(block.data()), beta, threads);
        blocks_.push_back(block);
    }

    bool ready() const { return drawer_.oldest() != Drawn::not_yet; }

    // How many were started and not taken.
    std::size_t asked() const { return drawer_.asked(); }

    // Waits for the oldest that was started, and lets it go. False at the timeout, or if another thread stopped it.
    bool take(std::optional<double> timeout) {
        const bool ends = timeout && *timeout < 1e9;
        const std::int64_t deadline_ns = ends ? now_ns() + static_cast<std::int64_t>(*timeout * 1e9) : forever_ns;
        Drawn drawn;
        while ((drawn = drawer_.oldest()) == Drawn::not_yet) {
            const std::shared_ptr<BatchPrefetcher::Shared> shared = drawer_.shared();
            if (!shared || now_ns() >= deadline_ns)
                return false;
            without_gil([&] { BatchPrefetcher::wait(*shared, std::min(deadline_ns, now_ns() + slice_ns)); });
            if (PyErr_CheckSignals() != 0)
                throw nb::python_error();
            require_open(*replay_->mapping(), replay_->label());
        }
        const std::exception_ptr error = drawer_.take();
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
        if (drawn == Drawn::nothing_there)
            nothing_to_sample();
        return true;
    }

    // Ends the drawer's thread; what was started is not drawn any more.
    void stop() {
        const std::shared_ptr<BatchPrefetcher::Shared> shared = drawer_.let_go();
        ++ending_;
        without_gil([&] { BatchPrefetcher::end(shared.get()); });
        if (--ending_ == 0)
            blocks_.clear();
    }

  private:
    [[noreturn]] void in_another_thread() const {
        raise("MemlaneError", "this sampler of the " + replay_->label() +
                                  " is drawing in another thread; make a sampler for each thread");
    }

    // While its thread ends, other Python threads run.
    void require_not_ending() const {
        if (ending_ > 0)
            raise("MemlaneError", "this sampler of the " + replay_->label() + " is being stopped by another thread");
    }

    std::int64_t count_of(const Block &block) const {
        require_open(*replay_->mapping(), replay_->label());
        require_writeable(*replay_->mapping(), replay_->label());
        const auto rows = static_cast<std::int64_t>(block.shape(0));
        if (block.shape(1) != sampler_.wish().row_bytes || rows == 0 || rows % sampler_.wish().length != 0)
            throw nb::value_error("the block has not the shape of this sampler's batches");
        return rows / sampler_.wish().length;
    }

    [[noreturn]] void nothing_to_sample() const {
        raise("NothingToSample", "no row of the " + replay_->label() + " can be drawn: " + std::to_string(replay_->size()) +
                                     " transitions are stored" +
                                     (replay_->size() > 0 ? ", none with all that this sampler needs around it (a row of a "
                                                            "stream needs the one after it); add more"
                                                          : "; add some first"));
    }

    static SampleSpec wish(const std::vector<Taken> &takes, std::size_t row_bytes, int steps, double gamma, int length,
                     const std::vector<std::int64_t> &places, const Replay::Shape &shape) {
        SampleSpec wish;
        wish.row_bytes = row_bytes;
        for (const auto &[from, bytes, to, stack, after] : takes) {
            if (head_bytes(shape.linked) + from + bytes > shape.stride_bytes || stack < 1 ||
                to + bytes * static_cast<std::size_t>(stack) > row_bytes)
                throw nb::value_error("a field is taken from outside of a row, or to outside of a batch");
            wish.takes.push_back({from, bytes, to, stack, after});
        }
        wish.steps = steps;
        wish.gamma = gamma;
        wish.length = length;
        std::int64_t *const wanted[] = {&wish.reward,  &wish.terminated, &wish.truncated, &wish.discount, &wish.horizon,
                                        &wish.key,     &wish.version,    &wish.weight,    &wish.valid};
        if (places.size() != std::size(wanted) || length < 1)
            throw nb::value_error("a wish has nine places and a length of 1 or more");
        for (std::size_t i = 0; i < places.size(); ++i) {
            if (places[i] >= 0 && static_cast<std::size_t>(places[i]) + 1 > row_bytes)
                throw nb::value_error("a place lies outside of a batch's row");
            *wanted[i] = places[i];
        }
        return wish;
    }

    std::shared_ptr<ReplayHandle> replay_;
    Sampler sampler_;
    Rng *dice_;
    std::atomic_flag busy_ = ATOMIC_FLAG_INIT;
    int ending_ = 0;           // threads that wait in `stop`
    std::deque<Block> blocks_; // that the drawer draws into
    BatchPrefetcher drawer_;            // last: its thread ends before what it uses goes
};

} // namespace

void bind_replay(nb::module_ &m) {
    m.attr("REPLAY_CONTROL_BYTES") = sizeof(ReplayControl);
    m.def("row_head_bytes", &head_bytes, "linked"_a, "What stands before the fields of each row.");
    m.def("sum_tree_bytes", &SumTree::bytes, "count"_a, "What the priorities of so many rows take.");

    nb::class_<ReplayHandle>(m, "Replay", "Rows that writers add, over and over the same slots, and samplers draw.")
        .def(nb::init<std::shared_ptr<Mapping>, std::size_t, std::size_t, std::optional<std::size_t>, std::size_t, std::int64_t,
                      std::int64_t, std::size_t, const std::vector<Column::Given> &,
                      std::tuple<std::size_t, std::size_t, std::size_t, bool>, std::tuple<double, std::int64_t, double>, double,
                      std::string>(),
             "mapping"_a, "control"_a, "rows"_a, "tree"_a.none(), "streams"_a, "stream_count"_a, "capacity"_a, "stride"_a,
             "columns"_a, "transition"_a, "limit"_a, "alpha"_a, "label"_a)
        .def_prop_ro("label", &ReplayHandle::label)
        .def("add_plain", &ReplayHandle::add_plain, "rows"_a,
             "The transitions added, or -1 if it must be the other way.")
        .def("add", &ReplayHandle::add_rows, "rows"_a, "version"_a, "streams"_a.none(), "skip"_a.none(), "finals"_a.none(),
             "has_final"_a.none(), "timeout"_a.none(), "peers"_a,
             "The transitions added, or -1 if an argument is not as it must be.")
        .def("set_priorities", &ReplayHandle::set_priorities, "keys"_a, "errors"_a,
             "How many of the rows were still there.")
        .def("begin_priorities", &ReplayHandle::begin_priorities)
        .def("total_priority", &ReplayHandle::total_priority)
        .def("added", &ReplayHandle::added)
        .def("last_number", &ReplayHandle::last_number, "Of the rows that were begun, final observations included.")
        .def("size", &ReplayHandle::size)
        .def("counters", &ReplayHandle::counters)
        .def("save_into", &ReplayHandle::save_into, "copy"_a, "How many rows had changed.")
        .def("counters_plausible", &ReplayHandle::counters_plausible)
        .def("first_implausible", &ReplayHandle::first_implausible);

    nb::class_<SamplerHandle>(m, "Sampler", "Draws rows of a replay into a block.")
        .def(nb::init<std::shared_ptr<ReplayHandle>, std::size_t, std::optional<std::uint64_t>,
                      const std::vector<SamplerHandle::Taken> &, std::size_t, int, double, int,
                      const std::vector<std::int64_t> &>(),
             "replay"_a, "dice"_a, "seed"_a.none(), "takes"_a, "row_bytes"_a, "steps"_a, "gamma"_a, "length"_a, "places"_a)
        .def("sample", &SamplerHandle::sample, "block"_a, "beta"_a, "threads"_a, "timeout"_a.none(), "peers"_a)
        .def("start", &SamplerHandle::start, "block"_a, "beta"_a, "threads"_a, "Draw into the block in a thread of its own.")
        .def("ready", &SamplerHandle::ready, "Whether the oldest that was started is drawn.")
        .def("take", &SamplerHandle::take, "timeout"_a.none(), "Wait for the oldest that was started; False at the timeout.")
        .def("asked", &SamplerHandle::asked, "How many were started and not taken.")
        .def("stop", &SamplerHandle::stop, "End the thread; what was started is not drawn any more.");
}
