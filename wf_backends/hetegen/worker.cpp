// A thread that computes without Python's GIL and calls nothing of CUDA: streams of a GPU may wait
// for it, since code that waits for the GPU, with the GIL or within the driver, never blocks it.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/mm.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <future>
#include <limits>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace {

using at::Tensor;
using Clock = std::chrono::steady_clock;

constexpr auto BUSY_WAIT = std::chrono::milliseconds(1);   // the thread polls for so long, and then
constexpr auto POLL_EVERY = std::chrono::microseconds(20); // sleeps between polls
constexpr auto GIL_WAIT = std::chrono::seconds(1);         // at most, to raise an error in Python

struct Task {
  int64_t number;             // written to the worker's flag `done` when the task has ended
  int64_t ready;              // it begins when the worker's flag `ready` is this or beyond
  std::function<void()> run;
  Tensor out;
};

// A number in pinned memory, which streams read and write, too.
class Flag {
 public:
  explicit Flag(Tensor memory) : memory_(std::move(memory)), value_(memory_.data_ptr<int64_t>()) {}

  bool reached(int64_t number) const { return __atomic_load_n(value_, __ATOMIC_ACQUIRE) >= number; }

  void write(int64_t number) { __atomic_store_n(value_, number, __ATOMIC_RELEASE); }

 private:
  Tensor memory_;
  int64_t* value_;
};

class Worker : public std::enable_shared_from_this<Worker> {
 public:
  // ready, done: int64, pinned, zero. busy_seconds: float64, to which the time of tasks is added.
  // raise_in_thread: worker.py's.
  Worker(Tensor ready, Tensor done, Tensor busy_seconds, pybind11::object raise_in_thread)
      : ready_(std::move(ready)), done_(std::move(done)), busy_seconds_(std::move(busy_seconds)),
        raise_in_thread_(std::move(raise_in_thread)), thread_([this] { loop(); }) {}

  ~Worker() { close(); }

  int64_t copy(Tensor source, Tensor out, int64_t ready) {
    return submit(ready, out, [=] { out.copy_(source); });
  }

  // x (n, columns) times weight (columns, rows): out (n, rows).
  int64_t multiply(Tensor weight, Tensor x, Tensor out) {
    return submit(last_ + 1, out, [=]() mutable { at::mm_out(out, x, weight); });
  }

  // Rows ids (...) of weight (rows, columns): out (..., columns).
  int64_t look_up(Tensor weight, Tensor ids, Tensor out) {
    return submit(last_ + 1, out, [=] { out.copy_(at::embedding(weight, ids)); });
  }

  // Raises the first error of a task since the last `cancel`, unless the caller's thread raised it.
  void check() {
    std::lock_guard lock(mutex_);
    if (!error_.empty() && !raised_) throw std::runtime_error(error_);
  }

  // Whether the caller's thread raised an error, and nothing was cancelled since.
  bool has_raised() {
    std::lock_guard lock(mutex_);
    return raised_;
  }

  // Ends all tasks, though those that had not begun did nothing.
  void cancel() {
    std::deque<Task> dropped;  // freed with the GIL
    cancelled_ = last_;
    pybind11::gil_scoped_release release;
    std::unique_lock lock(mutex_);
    dropped.swap(queue_);
    idle_.wait(lock, [this] { return !working_; });
    done_.write(last_);
    raised_ = false;
    error_.clear();
  }

  void close() {
    if (!thread_.joinable()) return;
    cancel();
    pybind11::gil_scoped_release release;
    {
      std::lock_guard lock(mutex_);
      closed_ = true;
    }
    changed_.notify_one();
    thread_.join();
  }

 private:
  int64_t submit(int64_t ready, Tensor out, std::function<void()> run) {
    std::vector<Task> ended;  // freed here, with the GIL: freeing may need it, or call CUDA
    std::lock_guard lock(mutex_);
    caller_ = PyThread_get_thread_ident();
    ended.swap(ended_);
    queue_.push_back({++last_, ready, std::move(run), std::move(out)});
    changed_.notify_one();
    return last_;
  }

  void loop() {
    at::init_num_threads();
    c10::InferenceMode inference;
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return closed_ || !queue_.empty(); });
      if (closed_) return;
      Task task = std::move(queue_.front());
      queue_.pop_front();
      working_ = true;
      lock.unlock();
      std::string error = wait_until_ready(task) ? run(task) : "";
      if (!error.empty()) raise_in_caller(task.number, error);
      lock.lock();
      done_.write(task.number);
      ended_.push_back(std::move(task));
      working_ = false;
      idle_.notify_all();
    }
  }

  // Has the thread that called raise the error before it can read the outputs, also if it calls
  // nothing more. If it holds the GIL while it waits for them, it raises right afterwards.
  void raise_in_caller(int64_t task, const std::string& error) {
    auto raised = std::make_shared<std::promise<void>>();
    auto future = raised->get_future();
    std::thread([self = weak_from_this(), task, error, raised] {
      pybind11::gil_scoped_acquire gil;
      if (auto worker = self.lock()) worker->keep_error(task, error);
      raised->set_value();
    }).detach();
    future.wait_for(GIL_WAIT);
  }

  void keep_error(int64_t task, const std::string& error) {
    unsigned long caller;
    {
      std::lock_guard lock(mutex_);
      if (task <= cancelled_ || !error_.empty()) return;
      caller = caller_;
    }
    bool raised = pybind11::cast<bool>(raise_in_thread_(caller, error));
    std::lock_guard lock(mutex_);
    error_ = error;
    raised_ = raised;
  }

  // Whether the flag `ready` came to the task's number; false if the task was cancelled.
  bool wait_until_ready(const Task& task) const {
    auto start = Clock::now();
    while (!ready_.reached(task.ready)) {
      if (task.number <= cancelled_) return false;
      if (Clock::now() - start < BUSY_WAIT) std::this_thread::yield();
      else std::this_thread::sleep_for(POLL_EVERY);
    }
    return true;
  }

  // Runs a task; returns its error, or "". The output of a task that failed is NaN, if it can be,
  // and stderr says so at once: another thread than the caller's may read it.
  std::string run(Task& task) {
    auto start = Clock::now();
    std::string error;
    try {
      task.run();
    } catch (const c10::Error& raised) {
      error = raised.what_without_backtrace();
    } catch (const std::exception& raised) {
      error = raised.what();
    }
    if (!error.empty()) {
      if (task.out.is_floating_point()) task.out.fill_(std::numeric_limits<double>::quiet_NaN());
      error = "HeteGen: rows of a split weight are NaN, since a worker failed: " + error;
      TORCH_WARN(error);
    }
    *busy_seconds_.data_ptr<double>() += std::chrono::duration<double>(Clock::now() - start).count();
    return error;
  }

  Flag ready_, done_;
  Tensor busy_seconds_;
  std::mutex mutex_;
  std::condition_variable changed_, idle_;
  std::deque<Task> queue_;
  std::vector<Task> ended_;
  int64_t last_ = 0;
  bool working_ = false, closed_ = false, raised_ = false;
  std::atomic<int64_t> cancelled_ = 0;  // the last task that is cancelled
  std::string error_;
  unsigned long caller_ = 0;  // Python's thread that submitted the last task
  pybind11::object raise_in_thread_;
  std::thread thread_;  // the last member: it uses all others
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  pybind11::class_<Worker, std::shared_ptr<Worker>>(module, "Worker")
      .def(pybind11::init<Tensor, Tensor, Tensor, pybind11::object>())
      .def("copy", &Worker::copy)
      .def("multiply", &Worker::multiply)
      .def("look_up", &Worker::look_up)
      .def("check", &Worker::check)
      .def("has_raised", &Worker::has_raised)
      .def("cancel", &Worker::cancel)
      .def("close", &Worker::close);
}
