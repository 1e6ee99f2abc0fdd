// What the six collectives do: they differ in what shape comes in and goes out;
// the engine does the rest.
#include <algorithm>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "custom_ops/engine/pages.h"
#include "custom_ops/engine/text.h"
#include "custom_ops/kernels/communicator.h"
#include "custom_ops/kernels/element_types.h"
#include "custom_ops/kernels/flight.h"
#include "custom_ops/kernels/inputs.h"
#include "tensorflow/core/framework/cancellation.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tfscale {
namespace {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::TensorShape;

// A message of kMaxPiece keeps a link busy. Below a smallest size the cost of a
// message outweighs what overlap gains, and later so where a low-precision wire
// was chosen, because then links are slow. Between them a chunk travels in
// kOverlap pieces. However many chunks there are, a part holds no more than
// kMaxPart.
constexpr int64_t kMaxPiece = int64_t{1} << 20;
constexpr int64_t kMinPiece = int64_t{512} << 10;
constexpr int64_t kMinLossyPiece = int64_t{128} << 10;
constexpr int64_t kOverlap = 4;
constexpr int64_t kMaxPart = int64_t{16} << 20;

Goal GoalOf(const std::string& op) {
  if (op == "TfscaleReduceScatter") return Goal::kReduceScatter;
  if (op == "TfscaleAllGather") return Goal::kAllGather;
  if (op == "TfscaleBroadcast") return Goal::kBroadcast;
  if (op == "TfscaleMix") return Goal::kMixture;
  if (op == "TfscaleRoute") return Goal::kRoute;
  return Goal::kAllReduce;
}

class CollectiveOp : public tensorflow::AsyncOpKernel {
 public:
  explicit CollectiveOp(OpKernelConstruction* ctx) : AsyncOpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("T", &type_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("bucket", &bucket_.label));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("bucket_owner", &bucket_.owner));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("bucket_graph", &bucket_.graph));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("bucket_number", &bucket_.number));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("stochastic", &stochastic_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("schedule", &schedule_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("piece_bytes", &piece_bytes_));
    goal_ = GoalOf(ctx->def().op());
    if (ctx->HasAttr("reduction")) OP_REQUIRES_OK(ctx, ctx->GetAttr("reduction", &reduction_));
    if (ctx->HasAttr("R")) {
      int residuals;
      OP_REQUIRES_OK(ctx, ctx->GetAttr("R", &residuals));
      has_residual_ = residuals > 0;
      OP_REQUIRES(
          ctx, residuals <= 1,
          absl::InvalidArgumentError(Text("expected at most one residual, got ", residuals)));
    }
    OP_REQUIRES_OK(ctx, ReadProgram(ctx));
    OP_REQUIRES_OK(ctx, ReadWire(ctx));
  }

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    tensorflow::core::RefCountPtr<CommunicatorResource> resource;
    OP_REQUIRES_OK_ASYNC(ctx, FindResource(ctx, 0, "communicator", &resource), done);
    auto job = std::make_shared<Job>();
    OP_REQUIRES_OK_ASYNC(ctx, ReadOne(ctx, 2, "seed", &job->seed), done);
    OP_REQUIRES_OK_ASYNC(ctx, CheckCommunicator(*resource), done);
    OP_REQUIRES_OK_ASYNC(ctx, FindFlight(ctx, job.get()), done);
    OP_REQUIRES_OK_ASYNC(ctx, Prepare(ctx, job.get()), done);
    if (program_->ranks == 1) return done();
    job->communicator = resource->engine();
    resource->WhenFormed(ctx, [=](const absl::Status& status, Open open) {
      OP_REQUIRES_OK_ASYNC(ctx, status, done);
      Launch(ctx, job, std::move(open), done);
    });
  }

 protected:
  // One run of the op: tensors that must outlive it, and where the result goes.
  struct Job {
    std::shared_ptr<Communicator> communicator;
    Tensor x, y, scratch;  // scratch: in the type of the sum, when neither x nor y can hold it
    Tensor brought;        // of a route: x as its wire encodes it, where x is of another type
    std::vector<int64_t> sizes_x, sizes_y;  // of a route: the numbers of each chunk
    Tensor residual, new_residual;
    std::shared_ptr<Flight> flight;  // keeps the result, if the op does not wait for it
    int64_t seed = 0;
    uint8_t* from = nullptr;  // the buffers that the engine sees
    uint8_t* to = nullptr;
    Status farewell;  // what other ranks are told if this step is cancelled
    std::mutex mutex;
    std::weak_ptr<Collective> running;
    bool cancelled = false;
  };
  using JobPtr = std::shared_ptr<Job>;

  virtual absl::Status FindFlight(OpKernelContext*, Job*) const { return absl::OkStatus(); }

  // Where result `index` is to be: 0 the sum, 1 what it has lost.
  virtual absl::Status NewResult(OpKernelContext* ctx, int index, const TensorShape& shape,
                                 Tensor* result) const {
    Tensor* output;
    // Peers of a mixture read the input while the output is written.
    const bool may_share = !sharded() && goal_ != Goal::kMixture && summed_as_ == type_;
    int forwarded = -1;
    if (index == 0 && may_share) {
      TF_RETURN_IF_ERROR(ctx->forward_input_or_allocate_output({1}, 0, shape, &output, &forwarded));
    } else {
      TF_RETURN_IF_ERROR(ctx->allocate_output(index, shape, &output));
    }
    if (forwarded < 0) Fresh(ctx, *output);
    *result = *output;
    return absl::OkStatus();
  }

  // A device's own memory, and what it reaches of the host's, is not the system's to page.
  static void Fresh(OpKernelContext* ctx, const Tensor& tensor) {
    const bool of_cpu = ctx->device()->attributes().device_type() == tensorflow::DEVICE_CPU;
    if (of_cpu) AskForHugePages(Bytes(tensor), tensor.TotalBytes());
  }

  static absl::Status NewTemporary(OpKernelContext* ctx, DataType type, const TensorShape& shape,
                                   Tensor* tensor) {
    TF_RETURN_IF_ERROR(ctx->allocate_temp(type, shape, tensor, OnHost()));
    Fresh(ctx, *tensor);
    return absl::OkStatus();
  }

  absl::Status ReadProgram(OpKernelConstruction* ctx) {
    int ranks, rank, chunks;
    std::vector<int> flat;
    TF_RETURN_IF_ERROR(ctx->GetAttr("ranks", &ranks));
    TF_RETURN_IF_ERROR(ctx->GetAttr("rank", &rank));
    TF_RETURN_IF_ERROR(ctx->GetAttr("chunks", &chunks));
    TF_RETURN_IF_ERROR(ctx->GetAttr("program", &flat));
    auto program = std::make_shared<Program>();
    TF_RETURN_IF_ERROR(ToAbsl(Program::Parse(flat, goal_, rank, ranks, chunks, program.get())));
    program_ = program;
    if (sharded() && chunks != ranks) {
      return absl::InvalidArgumentError(Text(ctx->def().op(), " needs one chunk per rank, got ",
                                             chunks, " chunks and ", ranks,
                                             " ranks; use ring, direct or halving"));
    }
    return absl::OkStatus();
  }

  absl::Status ReadWire(OpKernelConstruction* ctx) {
    std::string name;
    TF_RETURN_IF_ERROR(ctx->GetAttr("wire", &name));
    wire::Format format;
    if (!wire::ParseFormat(name, &format)) {
      return absl::InvalidArgumentError(
          Text("no wire is called '", name,
               "'; known are fp32, bf16, fp16, fp8, int8, int4, ternary and sign"));
    }
    summed_as_ = SummedAs(type_, format == wire::Format::kFp32);
    codec_ = wire::Find(format, ElementOf(summed_as_));
    const bool integer = tensorflow::DataTypeIsInteger(type_);
    if (codec_ == nullptr) {
      return absl::InvalidArgumentError(
          Text("wire '", name, "' carries floats only, got ", tensorflow::DataTypeString(type_),
               "; use wire 'fp32', which carries every type as it is"));
    }
    if (goal_ == Goal::kMixture && summed_as_ != type_) {
      return absl::InvalidArgumentError(
          Text("a mixture carries float, double, int32 or int64, got ",
               tensorflow::DataTypeString(type_)));
    }
    if (integer && (reduction_ == "mean" || has_residual_)) {
      return absl::InvalidArgumentError(Text("a ", has_residual_ ? "residual" : "mean", " of ",
                                             tensorflow::DataTypeString(type_),
                                             " is not defined; use 'sum', or cast to float"));
    }
    return absl::OkStatus();
  }

  bool sharded() const { return goal_ == Goal::kReduceScatter || goal_ == Goal::kAllGather; }

  absl::Status CheckCommunicator(const CommunicatorResource& resource) const {
    const auto& config = resource.config();
    const int ranks = static_cast<int>(config.peers.size());
    if (config.rank == program_->rank && ranks == program_->ranks) return absl::OkStatus();
    return absl::InvalidArgumentError(
        Text("bucket '", bucket_.Name(), "' has the program of rank ", program_->rank, " of ",
             program_->ranks, ", but its communicator is rank ", config.rank, " of ", ranks));
  }

  absl::Status OutputShape(const TensorShape& x, TensorShape* y) const {
    *y = x;
    if (!sharded()) return absl::OkStatus();
    if (x.dims() < 1)
      return absl::InvalidArgumentError(
          Text("bucket '", bucket_.Name(),
               "': expected at least one dimension to cut or join, got a scalar"));
    const int64_t first = x.dim_size(0), ranks = program_->ranks;
    if (goal_ == Goal::kAllGather) {
      const bool fits = first <= std::numeric_limits<int64_t>::max() / ranks &&
                        y->SetDimWithStatus(0, first * ranks).ok();
      if (fits) return absl::OkStatus();
      return absl::InvalidArgumentError(
          Text("bucket '", bucket_.Name(), "': ", ranks, " tensors of shape ", x.DebugString(),
               ", one of each rank, are more than one tensor can hold"));
    }
    if (first % ranks != 0) {
      return absl::InvalidArgumentError(
          Text("bucket '", bucket_.Name(), "': the first dimension of ", x.DebugString(),
               " cannot be shared evenly among ", ranks, " ranks; pad it"));
    }
    return y->SetDimWithStatus(0, first / ranks);
  }

  // Finds buffers for the sum: the input's and output's own where they fit, a
  // scratch buffer where the type or the length differs.
  virtual absl::Status Prepare(OpKernelContext* ctx, Job* job) const {
    TF_RETURN_IF_ERROR(AllocateOutput(ctx, job));
    TF_RETURN_IF_ERROR(AllocateResidual(ctx, job));
    job->from = Bytes(job->x);
    job->to = Bytes(job->y);
    if (program_->ranks == 1) return absl::OkStatus();
    const bool scatter = goal_ == Goal::kReduceScatter;
    const bool other_type = summed_as_ != type_;
    if (other_type || scatter) {
      const TensorShape& longer = scatter ? job->x.shape() : job->y.shape();
      if (job->scratch.NumElements() == 0)  // the input could not be taken
        TF_RETURN_IF_ERROR(NewTemporary(ctx, summed_as_, longer, &job->scratch));
      job->to = Bytes(job->scratch);
    }
    const bool gather = goal_ == Goal::kAllGather;
    if (other_type || gather) {
      uint8_t* mine = job->to + (gather ? program_->rank * Count(job->x) * SumBytes() : 0);
      Bring(job->x, summed_as_, mine);
      job->from = job->to;
    }
    return absl::OkStatus();
  }

  // The input is forwarded only while nobody else holds it, so the job takes
  // hold of it afterwards.
  absl::Status AllocateOutput(OpKernelContext* ctx, Job* job) const {
    TensorShape shape;
    TF_RETURN_IF_ERROR(OutputShape(ctx->input(1).shape(), &shape));
    if (program_->ranks == 1) {  // costs nothing
      job->x = job->y = ctx->input(1);
      ctx->set_output(0, job->y);
      return absl::OkStatus();
    }
    TF_RETURN_IF_ERROR(NewResult(ctx, 0, shape, &job->y));
    if (goal_ == Goal::kReduceScatter && summed_as_ == type_) {  // sums where the input is
      const std::unique_ptr<Tensor> own = ctx->forward_input(
          1, OpKernelContext::Params::kNoReservation, type_, ctx->input(1).shape(),
          ctx->input_memory_type(1), ctx->input_alloc_attr(1));
      if (own != nullptr) job->scratch = *own;
    }
    job->x = ctx->input(1);
    return absl::OkStatus();
  }

  absl::Status AllocateResidual(OpKernelContext* ctx, Job* job) const {
    if (!has_residual_) return absl::OkStatus();
    job->residual = ctx->input(3);
    if (job->residual.shape() != job->x.shape()) {
      return absl::InvalidArgumentError(
          Text("bucket '", bucket_.Name(), "': the residual must have the shape of x, ",
               job->x.shape().DebugString(), ", got ", job->residual.shape().DebugString()));
    }
    if (program_->ranks == 1) {
      ctx->set_output(1, job->residual);
      return absl::OkStatus();
    }
    return NewResult(ctx, 1, job->residual.shape(), &job->new_residual);
  }

  static tensorflow::AllocatorAttributes OnHost() {
    tensorflow::AllocatorAttributes attributes;
    attributes.set_on_host(true);
    return attributes;
  }

  static int64_t Count(const Tensor& tensor) { return tensor.NumElements(); }
  int64_t SumBytes() const { return codec_->element_bytes(); }

  virtual Layout MakeLayout(const Job& job) const {
    const int64_t count = Count(job.x), ranks = program_->ranks, chunks = program_->chunks;
    switch (goal_) {
      case Goal::kReduceScatter:
        return Layout::Sharded(count / ranks, program_->chunks, PieceSize(count / ranks), Unit());
      case Goal::kAllGather:
        return Layout::Sharded(count, program_->chunks, PieceSize(count), Unit());
      default:
        return Layout::Joined(count, program_->chunks, PieceSize(count / chunks), Unit());
    }
  }

  int64_t Unit() const { return codec_->lossless() ? 16 : wire::kBlock; }

  // How many numbers travel in a message of a chunk of `count` numbers, of which a part has
  // `chunks`.
  int64_t PieceSize(int64_t count) const { return PieceSize(count, program_->chunks); }
  int64_t PieceSize(int64_t count, int chunks) const {
    int64_t bytes = piece_bytes_;
    if (bytes <= 0) {
      const int64_t least = codec_->lossless() ? kMinPiece : kMinLossyPiece;
      bytes = std::clamp(codec_->Bytes(count) / kOverlap, least, kMaxPiece);
      bytes = std::min(bytes, kMaxPart / chunks);
    }
    bytes = std::min(bytes, std::max<int64_t>(1, codec_->Bytes(count)));
    return std::max(Unit(), bytes * wire::kBlock / codec_->Bytes(wire::kBlock));
  }

  virtual std::string Signature(const Job& job, const Layout& layout) const {
    std::string doing = goal_ == Goal::kAllReduce       ? "all_reduce "
                        : goal_ == Goal::kReduceScatter ? "reduce_scatter "
                        : goal_ == Goal::kAllGather     ? "all_gather"
                        : goal_ == Goal::kMixture       ? "mixture"
                                                        : "broadcast";
    if (goal_ == Goal::kAllReduce || goal_ == Goal::kReduceScatter) doing += reduction_;
    return Text(doing, " of ", tensorflow::DataTypeString(type_), job.x.shape().DebugString(),
                Sent(layout));
  }

  // The end of a signature: how it is sent.
  std::string Sent(const Layout& layout) const {
    return Text(" over wire ", std::string(codec_->name()), stochastic_ ? " (stochastic)" : "",
                has_residual_ ? " with a residual" : "", " by ", schedule_, " in pieces of ",
                layout.piece_size());
  }

  virtual Request MakeRequest(OpKernelContext* ctx, const JobPtr& job, Open open) const {
    Request request;
    request.bucket = bucket_;
    request.name = Text(bucket_.Name(), IterationName(ctx));
    request.step = ctx->step_id();
    request.program = program_;
    request.layout = MakeLayout(*job);
    request.signature = Signature(*job, request.layout);
    request.codec = codec_;
    request.element = ElementOf(summed_as_);
    request.rounding.stochastic = stochastic_;
    request.rounding.seed = static_cast<uint64_t>(job->seed);
    request.mean = reduction_ == "mean";
    request.x = job->from;
    request.y = job->to;
    if (has_residual_) {
      request.residual = reinterpret_cast<const float*>(Bytes(job->residual));
      request.new_residual = reinterpret_cast<float*>(Bytes(job->new_residual));
    }
    request.owner = job;
    request.open = std::move(open);
    return request;
  }

  // Iterations of a loop may run at the same time. (Ids of frames are no help:
  // they need not be the same in every process.)
  static std::string IterationName(OpKernelContext* ctx) {
    const int64_t iteration = ctx->frame_iter().iter_id;
    return iteration == 0 ? "" : Text("@", iteration);
  }

  // A step that is cancelled before this op begins still begins it: the other
  // ranks wait for it, and must be told.
  virtual void Launch(OpKernelContext* ctx, const JobPtr& job, Open open, DoneCallback done) {
    job->farewell = Farewell(*job);
    tensorflow::CancellationManager* manager = ctx->cancellation_manager();
    const tensorflow::CancellationToken token = manager->get_cancellation_token();
    const bool registered = manager->RegisterCallback(token, [job, executor = ExecutorOf(ctx)] {
      executor->RunClosure([job, executor] { Cancel(job); });
    });
    Request request = MakeRequest(ctx, job, std::move(open));
    const auto finish = [this, ctx, job, manager, token, done](const Status& status) {
      manager->TryDeregisterCallback(token);
      if (status.ok()) Deliver(job.get());
      if (!status.ok()) ctx->SetStatus(ToAbsl(status));
      done();
    };
    // From here on the op may end at any time, and this kernel with it.
    Start(job, std::move(request), finish, !registered);
  }

  // What other ranks are told if the step is cancelled.
  Status Farewell(const Job& job) const {
    return Status(
        Code::kCancelled,
        Text("bucket '", bucket_.Name(), "': ", job.communicator->Describe(program_->rank),
             " left it because its step ended early; its own log says why"));
  }

  static void Start(const JobPtr& job, Request request, Done finish, bool cancelled) {
    auto running = job->communicator->Start(std::move(request), std::move(finish));
    {
      std::lock_guard<std::mutex> lock(job->mutex);
      job->running = running;
      cancelled |= job->cancelled;
    }
    if (cancelled && running != nullptr) running->Fail(job->farewell);
  }

  // Held from now on: when a step is cancelled, its own reference may be gone.
  static std::shared_ptr<tensorflow::CollectiveExecutor> ExecutorOf(OpKernelContext* ctx) {
    tensorflow::CollectiveExecutor* executor = ctx->collective_executor();
    executor->Ref();
    return {executor, [](tensorflow::CollectiveExecutor* held) { held->Unref(); }};
  }

  static void Cancel(const JobPtr& job) {
    std::shared_ptr<Collective> running;
    {
      std::lock_guard<std::mutex> lock(job->mutex);
      job->cancelled = true;
      running = job->running.lock();
    }
    if (running != nullptr) running->Fail(job->farewell);
  }

  // Brings the result from the scratch buffer to the output.
  virtual void Deliver(Job* job) const {
    if (job->to == Bytes(job->y)) return;
    const uint8_t* from = job->to;
    if (goal_ == Goal::kReduceScatter) from += program_->rank * Count(job->y) * SumBytes();
    if (summed_as_ != type_) {
      Narrow(from, &job->y);
    } else {
      std::memcpy(Bytes(job->y), from, Count(job->y) * SumBytes());
    }
  }

  DataType type_, summed_as_;
  BucketId bucket_;
  std::string schedule_, reduction_ = "sum";
  bool stochastic_ = false, has_residual_ = false;
  int64_t piece_bytes_ = 0;
  Goal goal_;
  std::shared_ptr<const Program> program_;
  const wire::Codec* codec_ = nullptr;
};

// Brings chunks of x to other ranks, and puts chunks of theirs into y. Nothing is summed, so
// numbers that are not rounded are nothing but bytes.
class RouteOp : public CollectiveOp {
 public:
  explicit RouteOp(OpKernelConstruction* ctx) : CollectiveOp(ctx) {
    if (!ctx->status().ok()) return;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("ragged", &ragged_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("detached", &detached_));
    std::vector<int> brings, gets;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("brings", &brings));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("gets", &gets));
    OP_REQUIRES(ctx, !detached_ || gets.empty(),
                absl::InvalidArgumentError("a route that gets something is waited for"));
    auto placed = std::make_shared<Program>(*program_);
    OP_REQUIRES_OK(ctx, ToAbsl(placed->Place(brings, gets)));
    program_ = placed;
    if (codec_->lossless()) {
      codec_ = wire::Find(wire::Format::kFp32, wire::Element::kByte);
      summed_as_ = type_;
    }
    OP_REQUIRES(ctx, codec_->lossless() || tensorflow::DataTypeIsFloating(type_),
                absl::InvalidArgumentError(Text("wire '", std::string(codec_->name()),
                                                "' carries floats only, got ",
                                                tensorflow::DataTypeString(type_))));
  }

 private:
  absl::Status Prepare(OpKernelContext* ctx, Job* job) const override {
    job->x = ctx->input(1);
    TensorShape shape = job->x.shape();
    if (shape.dims() < 1) {
      return absl::InvalidArgumentError(
          Text("bucket '", bucket_.Name(), "': expected a tensor with rows, got a scalar"));
    }
    int64_t row = codec_->lossless() ? tensorflow::DataTypeSize(type_) : 1;
    for (int i = 1; i < shape.dims(); ++i) row *= shape.dim_size(i);
    int64_t rows = 0;
    TF_RETURN_IF_ERROR(ReadSizes(ctx, 3, "brought", program_->brings, row, &job->sizes_x, &rows));
    if (rows != shape.dim_size(0)) {
      return absl::InvalidArgumentError(Text("bucket '", bucket_.Name(), "': x has ",
                                             shape.dim_size(0), " rows, but the sizes add up to ",
                                             rows));
    }
    TF_RETURN_IF_ERROR(ReadSizes(ctx, 4, "got", program_->gets, row, &job->sizes_y, &rows));
    TF_RETURN_IF_ERROR(CheckWhatStays(*job));
    TF_RETURN_IF_ERROR(shape.SetDimWithStatus(0, rows));
    if (program_->ranks == 1) {
      ctx->set_output(0, job->x);
      return absl::OkStatus();
    }
    Tensor* output;
    TF_RETURN_IF_ERROR(ctx->allocate_output(0, shape, &output));
    Fresh(ctx, *output);
    job->y = *output;
    job->from = Bytes(job->x);
    job->to = Bytes(job->y);
    return summed_as_ == type_ ? absl::OkStatus() : Widen(ctx, job);
  }

  // The sizes of these chunks in numbers (or bytes), and how many rows they have together.
  absl::Status ReadSizes(OpKernelContext* ctx, int index, const char* name,
                         const std::vector<int>& chunks, int64_t row, std::vector<int64_t>* sizes,
                         int64_t* rows) const {
    const Tensor& given = ctx->input(index);
    if (!tensorflow::TensorShapeUtils::IsVector(given.shape()) ||
        given.NumElements() != static_cast<int64_t>(chunks.size())) {
      return absl::InvalidArgumentError(Text("bucket '", bucket_.Name(), "': ", name, " must be ",
                                             chunks.size(), " numbers of rows, got a tensor of ",
                                             "shape ", given.shape().DebugString()));
    }
    const int64_t most = std::numeric_limits<int64_t>::max() / std::max<int64_t>(1, row);
    *rows = 0;
    for (size_t i = 0; i < chunks.size(); ++i) {
      const int64_t size = given.flat<int64_t>()(i);
      if (size < 0 || size > most - *rows) {
        return absl::InvalidArgumentError(
            Text("bucket '", bucket_.Name(), "': ", size, " is no number of rows of ", name,
                 "; expected whole numbers from 0 whose sum a tensor can hold"));
      }
      *rows += size;
      sizes->push_back(size * row);
    }
    return absl::OkStatus();
  }

  // A chunk that this rank has for itself is as large in y as in x.
  absl::Status CheckWhatStays(const Job& job) const {
    for (size_t i = 0; i < program_->brings.size(); ++i) {
      for (size_t k = 0; k < program_->gets.size(); ++k) {
        if (program_->brings[i] == program_->gets[k] && job.sizes_x[i] != job.sizes_y[k]) {
          return absl::InvalidArgumentError(
              Text("bucket '", bucket_.Name(), "': rank ", program_->rank,
                   " brings itself another number of rows than it gets of itself"));
        }
      }
    }
    return absl::OkStatus();
  }

  // The wire rounds float32.
  absl::Status Widen(OpKernelContext* ctx, Job* job) const {
    TF_RETURN_IF_ERROR(NewTemporary(ctx, summed_as_, job->x.shape(), &job->brought));
    TF_RETURN_IF_ERROR(NewTemporary(ctx, summed_as_, job->y.shape(), &job->scratch));
    job->from = Bytes(job->brought);
    job->to = Bytes(job->scratch);
    Bring(job->x, summed_as_, job->from);
    return absl::OkStatus();
  }

  Layout MakeLayout(const Job& job) const override {
    const int chunks = std::max(1, program_->chunks / program_->ranks);
    int64_t largest = kOverlap * kMaxPiece;  // of all ranks, as far as any of them knows
    if (!ragged_) {
      largest = 0;
      for (const int64_t size : job.sizes_x) largest = std::max(largest, size);
      for (const int64_t size : job.sizes_y) largest = std::max(largest, size);
    }
    return Layout::Routed(program_->chunks, program_->brings, job.sizes_x, program_->gets,
                          job.sizes_y, PieceSize(largest, chunks), Unit());
  }

  std::string Signature(const Job& job, const Layout& layout) const override {
    const Tensor& whole = program_->brings.empty() ? job.y : job.x;
    std::string shape = whole.shape().DebugString();
    if (ragged_) shape.replace(1, shape.find_first_of(",]") - 1, "?");
    return Text("route of ", tensorflow::DataTypeString(type_), shape, Sent(layout));
  }

  Request MakeRequest(OpKernelContext* ctx, const JobPtr& job, Open open) const override {
    Request request = CollectiveOp::MakeRequest(ctx, job, std::move(open));
    request.ragged = ragged_;
    return request;
  }

  // A detached op ends as soon as the engine has the numbers: neither the op nor its kernel live
  // until they are sent.
  void Launch(OpKernelContext* ctx, const JobPtr& job, Open open, DoneCallback done) override {
    if (!detached_) return CollectiveOp::Launch(ctx, job, std::move(open), std::move(done));
    job->farewell = Farewell(*job);
    Request request = MakeRequest(ctx, job, std::move(open));
    tensorflow::CancellationManager* manager = ctx->cancellation_manager();
    const tensorflow::CancellationToken token = manager->get_cancellation_token();
    const auto give_up = [job, name = request.name, executor = ExecutorOf(ctx)] {
      executor->RunClosure([job, name, executor] {
        job->communicator->GiveUpDetached(name, job->farewell);
      });
    };
    const bool registered = manager->RegisterCallback(token, give_up);
    job->communicator->StartDetached(std::move(request), [=](const Status& status) {
      manager->TryDeregisterCallback(token);
      if (!status.ok()) ctx->SetStatus(ToAbsl(status));
      done();
    });
    if (!registered) give_up();
  }

  void Deliver(Job* job) const override {
    if (job->to != Bytes(job->y)) Narrow(job->to, &job->y);
  }

  bool ragged_ = false, detached_ = false;
};

// Begins an all-reduce, of which a flight holds all that must outlive the op.
class BeginOp : public CollectiveOp {
 public:
  explicit BeginOp(OpKernelConstruction* ctx) : CollectiveOp(ctx) {
    if (!ctx->status().ok()) return;
    OP_REQUIRES(ctx, program_->ranks > 1,
                absl::InvalidArgumentError("one rank has nobody to exchange anything with"));
  }

 private:
  absl::Status FindFlight(OpKernelContext* ctx, Job* job) const override {
    tensorflow::core::RefCountPtr<Flight> found;
    TF_RETURN_IF_ERROR(FindResource(ctx, ctx->num_inputs() - 1, "flight", &found));
    job->flight = Shared(std::move(found));
    return absl::OkStatus();
  }

  absl::Status NewResult(OpKernelContext* ctx, int, const TensorShape& shape,
                         Tensor* result) const override {
    return NewTemporary(ctx, type_, shape, result);
  }

  // Neither the op nor its kernel need to live until the exchange ends, nor does the step.
  void Launch(OpKernelContext* ctx, const JobPtr& job, Open open, DoneCallback done) override {
    const std::shared_ptr<Flight> flight = std::move(job->flight);
    job->farewell = Farewell(*job);
    auto request = std::make_shared<Request>(MakeRequest(ctx, job, std::move(open)));
    const auto start = [job, flight, request,
                        executor = ExecutorOf(ctx)](const Flight::ExchangePtr& exchange) {
      const bool goes = flight->Depart(
          exchange, [job, executor] { executor->RunClosure([job] { Cancel(job); }); });
      const auto finish = [job, flight, exchange](const Status& status) {
        flight->Arrive(exchange, ToAbsl(status), job->y, job->new_residual);
      };
      Start(job, std::move(*request), finish, /*cancelled=*/!goes);
    };
    flight->Book(start, done);
  }
};

// On a GPU the numbers are brought to the host first: that is where the
// network is.
#define TFSCALE_KERNEL(NAME, OP, MORE)                                    \
  REGISTER_KERNEL_BUILDER(Name(NAME).Device(tensorflow::DEVICE_CPU), OP); \
  REGISTER_KERNEL_BUILDER(Name(NAME)                                      \
                              .Device(tensorflow::DEVICE_GPU)             \
                              .HostMemory("communicator")                 \
                              .HostMemory("x")                            \
                              .HostMemory("seed")                         \
                              .HostMemory("y") MORE,                      \
                          OP)
#define TFSCALE_RESIDUALS .HostMemory("residual").HostMemory("new_residual")
TFSCALE_KERNEL("TfscaleAllGather", CollectiveOp, );
TFSCALE_KERNEL("TfscaleBroadcast", CollectiveOp, );
TFSCALE_KERNEL("TfscaleMix", CollectiveOp, );
TFSCALE_KERNEL("TfscaleRoute", RouteOp, .HostMemory("brought").HostMemory("got"));
TFSCALE_KERNEL("TfscaleAllReduce", CollectiveOp, TFSCALE_RESIDUALS);
TFSCALE_KERNEL("TfscaleReduceScatter", CollectiveOp, TFSCALE_RESIDUALS);
#undef TFSCALE_RESIDUALS
#undef TFSCALE_KERNEL
REGISTER_KERNEL_BUILDER(Name("TfscaleBegin").Device(tensorflow::DEVICE_CPU), BeginOp);
REGISTER_KERNEL_BUILDER(Name("TfscaleBegin")
                            .Device(tensorflow::DEVICE_GPU)
                            .HostMemory("communicator")
                            .HostMemory("x")
                            .HostMemory("seed")
                            .HostMemory("residual")
                            .HostMemory("flight"),
                        BeginOp);

}  // namespace
}  // namespace tfscale
