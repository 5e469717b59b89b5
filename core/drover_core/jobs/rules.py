"""The table of rules: a form of line, the failure that it stands for, and where that is written down.

A rule is a cause or a consequence (something died elsewhere). A line
that its program logged as INFO or WARNING is no cause, whatever it says: the program went on. Only rules with
`quiet=True` read such lines. `needle` must be in the line, in lower case, before `pattern` is tried.

Sources, by the letter in each row:
[T] PyTorch: torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, NCCLUtils.hpp, c10/cuda/CUDACachingAllocator.cpp,
    torch/utils/data, torch/_utils.py, torch/distributed/elastic/multiprocessing, caffe2/serialize/inline_container.cc
[G] gloo: gloo/transport/tcp/pair.cc, unbound_buffer.cc
[N] NCCL: src/transport/net_ib, src/misc/socket.cc; its user guide, "Errors" and "Logging"
[C] CUDA runtime API, cudaError_t: driver_types.h
[K] Linux: mm/oom_kill.c, include/uapi/asm-generic/errno.h with glibc's words for each number
[S] Slurm: src/slurmd/slurmstepd/req.c (_handle_signal_container), src/plugins/task/cgroup (OOM), srun's lines of tasks
    as published in job logs
[P] Python: the exceptions of its library reference; faulthandler
[X] XLA and TensorFlow: status codes of absl (RESOURCE_EXHAUSTED, ...), xla/tsl allocators
[8] Kubernetes: reasons of container states and pod conditions (kubernetes.io, "Pod lifecycle", "Disruptions")
[R] Ray: ray/exceptions.py; its memory monitor
[M] MPI launchers: orterun's and prterun's messages
[D] DeepSpeed and Megatron: their launchers' lines
[V] NVIDIA's driver: "NVRM: Xid" (drover_core.xid has the codes)
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from drover_core.jobs.lines import Form
from drover_core.jobs.model import Failure


class Role(StrEnum):
    CAUSE = "cause"
    CONSEQUENCE = "consequence"


LOUD = frozenset({Form.EXCEPTION, Form.NCCL, Form.KERNEL, Form.SCHEDULER, Form.OTHER})
RAISED = frozenset({Form.EXCEPTION})
SLURM = frozenset({Form.SCHEDULER})
NCCL = frozenset({Form.NCCL})
KERNEL = frozenset({Form.KERNEL, Form.OTHER})


@dataclass(frozen=True, slots=True)
class Rule:
    id: str
    failure: Failure
    role: Role
    confidence: float
    needle: str
    pattern: re.Pattern[str]
    source: str
    forms: frozenset[Form] = LOUD


def _row(
    id: str, failure: Failure, confidence: float, needle: str, pattern: str, source: str,
    *, role: Role = Role.CAUSE, forms: frozenset[Form] = LOUD, quiet: bool = False,
) -> Rule:  # fmt: skip
    allowed = forms | {Form.QUIET} if quiet else forms
    return Rule(id, failure, role, confidence, needle, re.compile(pattern), source, allowed)


F = Failure
_C = Role.CONSEQUENCE
_ERRNO = r"(?:\[Errno {0}\]|\(errno:? ?{0}\b|errno[ =]{0}\b|os error {0}\b|{1})"


def _errno(number: int, words: str) -> str:
    return _ERRNO.format(number, words)


# One row a rule; a formatter would spread them over nine lines each.
# fmt: off
RULES: tuple[Rule, ...] = (
    # GPU hardware
    _row("xid", F.GPU_HARDWARE, .9, "xid", r"NVRM: (?:GPU at .{1,60}: )?Xid \(.{1,60}\): \d+", "V", forms=KERNEL),
    _row("cuda-ecc", F.GPU_HARDWARE, .97, "ecc error", r"[Uu]ncorrectable ECC error encountered|CUDA_ERROR_ECC_UNCORRECTABLE", "C"),
    _row("cuda-nvlink", F.GPU_HARDWARE, .95, "nvlink", r"uncorrectable NVLink error detected|CUDA_ERROR_NVLINK_UNCORRECTABLE", "C"),
    _row("cuda-contained", F.GPU_HARDWARE, .95, "contain", r"CUDA error: (?:Invalid access of peer GPU memory over nvlink or a hardware error|.{0,40}hardware error)|CUDA_ERROR_CONTAINED", "C"),
    _row("gpu-lost", F.GPU_HARDWARE, .95, "gpu", r"GPU has fallen off the bus|GPU is lost|NVML_ERROR_GPU_IS_LOST|Unable to determine the device handle for GPU", "V"),
    _row("cuda-hardware-stack", F.GPU_HARDWARE, .7, "hardware stack error", r"hardware stack error", "C"),
    _row("cuda-no-device", F.GPU_HARDWARE, .6, "cuda", r"no CUDA-capable device is detected|CUDA_ERROR_NO_DEVICE|CUDA error: (?:device unavailable|system not yet initialized)|CUDA_ERROR_SYSTEM_NOT_READY", "C"),
    _row("cuda-802", F.GPU_HARDWARE, .6, "802", r"Error 802: system not yet initialized", "C"),
    _row("cuda-unknown", F.GPU_HARDWARE, .5, "cuda", r"CUDA error: unknown error\b|CUDA-capable device\(s\) is/are busy or unavailable|cudaErrorDevicesUnavailable", "C"),
    _row("nvswitch-fatal", F.GPU_HARDWARE, .9, "sxid", r"nvidia-nvswitch\d*: SXid \(.{1,60}\): \d+, Fatal", "V", forms=KERNEL),
    # GPU memory
    _row("torch-oom", F.GPU_OOM, .98, "out of memory. tried to allocate", r"(?:CUDA|HIP|XPU|MPS backend)[\w ]{0,20} out of memory\. Tried to allocate", "T"),
    _row("torch-oom-class", F.GPU_OOM, .95, "outofmemoryerror", r"(?:torch\.(?:cuda\.)?|^)OutOfMemoryError\b", "T", forms=RAISED | {Form.OTHER}),
    _row("cuda-oom", F.GPU_OOM, .95, "out of memory", r"CUDA error: out of memory|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation|Cuda failure .{0,60}'?out of memory", "C"),
    _row("oom-raised", F.GPU_OOM, .95, "out of memory", r"(?:CUDA|HIP) out of memory", "T", forms=RAISED),
    _row("cublas-alloc", F.GPU_OOM, .7, "alloc_failed", r"(?:CUBLAS|CUDNN|CUSOLVER)_STATUS_(?:INTERNAL_ERROR_HOST_|DEVICE_)?ALLOC(?:ATION)?_FAILED", "C"),
    _row("xla-oom", F.GPU_OOM, .9, "resource_exhausted", r"RESOURCE_EXHAUSTED: .{0,80}(?:[Oo]ut of memory|[Ff]ailed to allocate|[Aa]llocat)", "X"),
    _row("tf-oom", F.GPU_OOM, .9, "oom when allocating", r"OOM when allocating tensor .{0,300}(?:GPU|gpu|by allocator)", "X"),
    _row("vllm-kv", F.GPU_OOM, .8, "memory", r"No available memory for the cache blocks|larger than the maximum number of tokens that can be stored in KV cache|Free memory on device .{0,120}is less than desired GPU memory utilization|memory is needed, which is larger than the available KV cache memory", "vLLM: vllm/v1/core/kv_cache_utils.py, vllm/v1/worker"),
    # host memory
    _row("kernel-oom", F.HOST_OOM, .97, "out of memory", r"(?:Memory cgroup o|O)ut of memory.{0,60}: Kill(?:ed)? process \d+", "K", forms=KERNEL, quiet=True),
    _row("slurm-oom", F.HOST_OOM, .97, "oom", r"[Dd]etected \d+ oom[_-]kill event|oom-kill event\(s\) in|task \d.{0,40}: Out Of Memory\b", "S", forms=SLURM),
    _row("slurm-memory", F.HOST_OOM, .95, "memory limit", r"[Ee]xceeded (?:job |step )?memory limit", "S", forms=SLURM),
    _row("k8s-oom", F.HOST_OOM, .97, "oomkilled", r"\bOOMKilled\b(?![\"']?\s{0,3}[:=]\s{0,3}[\"']?(?:[Ff]alse|null|[Nn]one|0)\b)", "8", quiet=True),
    _row("cpu-alloc", F.HOST_OOM, .95, "allocate memory", r"(?:DefaultCPUAllocator: (?:can't|not enough memory)|[Cc]annot allocate memory|os error 12\b).{0,80}(?:allocate|memory|$)", "T"),
    _row("memory-error", F.HOST_OOM, .93, "memoryerror", r"^(?:numpy\.\w+\.{0,1}\w*\.?_?Array)?MemoryError\b|^numpy\.[\w.]*_ArrayMemoryError\b|Caught MemoryError in", "P", forms=RAISED | {Form.OTHER}),
    _row("bad-alloc", F.HOST_OOM, .9, "bad_alloc", r"std::bad_alloc", "C++ library"),
    _row("enomem", F.HOST_OOM, .9, "errno 12", r"\[Errno 12\]", "K"),
    _row("loader-killed", F.HOST_OOM, .65, "killed by signal", r"DataLoader worker \(pid[^)]{0,40}\) is killed by signal: Killed", "T"),
    _row("loader-bus", F.HOST_OOM, .8, "bus error", r"DataLoader worker \(pid[^)]{0,40}\) is killed by signal: Bus error|out of shared memory", "T"),
    _row("nccl-shm", F.HOST_OOM, .97, "shared memory segment", r"Error while (?:creating|attaching to) shared memory segment", "N"),
    _row("ray-oom", F.HOST_OOM, .95, "memory", r"ray\.exceptions\.OutOfMemoryError|were killed due to the node running low on memory", "R"),
    _row("pinned", F.HOST_OOM, .7, "host allocator", r"[Ff]ailed to allocate .{0,60}(?:pinned|host) memory|cudaHostAlloc.{0,60}out of memory", "X"),
    # storage
    _row("enospc", F.STORAGE, .96, "no space left on device", r"No space left on device", "K"),
    _row("enospc-number", F.STORAGE, .96, "errno 28]", r"\[Errno 28\]", "K"),
    _row("enospc-rust", F.STORAGE, .96, "os error 28", r"os error 28\b", "K"),
    _row("edquot", F.STORAGE, .96, "quota", _errno(122, "Disk quota exceeded"), "K"),
    _row("eio", F.STORAGE, .95, "input/output error", r"Input/output error|\[Errno 5\]", "K"),
    _row("estale", F.STORAGE, .96, "stale", r"Stale (?:NFS )?file handle|\[Errno 116\]", "K"),
    _row("erofs", F.STORAGE, .95, "read-only file system", r"Read-only file system|\[Errno 30\]", "K"),
    _row("enotconn", F.STORAGE, .85, "transport endpoint", r"Transport endpoint is not connected|Cannot send after transport endpoint shutdown|\[Errno 10[78]\]", "K"),
    _row("eremoteio", F.STORAGE, .9, "remote i/o error", r"Remote I/O error|\[Errno 121\]", "K"),
    _row("torch-writer", F.STORAGE, .85, "failed writing file", r"PytorchStreamWriter failed writing file|\bfile write failed\b", "T"),
    _row("torch-unexpected-pos", F.STORAGE, .8, "unexpected pos", r"unexpected pos \d+ vs \d+", "T"),
    _row("torch-reader", F.STORAGE, .7, "failed finding central directory", r"PytorchStreamReader failed (?:finding central directory|reading)", "T"),
    _row("safetensors", F.STORAGE, .65, "safetensorerror", r"SafetensorError: .{0,80}(?:incomplete metadata|invalid header|I/O error)|MetadataIncompleteBuffer", "safetensors: bindings"),
    _row("nfs-server", F.STORAGE, .7, "not responding", r"nfs: server \S{1,120} not responding", "K", forms=KERNEL),
    _row("disk", F.STORAGE, .85, "i/o error", r"\bI/O error, dev \w+, sector|EXT4-fs error|XFS \(\S+\): .{0,80}I/O [Ee]rror|LustreError: ", "K", forms=KERNEL),
    # the scheduler's word
    _row("slurm-time", F.TIME_LIMIT, .99, "time limit", r"DUE TO TIME LIMIT|has exceeded its time limit", "S", forms=SLURM),
    _row("k8s-deadline", F.TIME_LIMIT, .95, "deadlineexceeded", r"\bReason: +DeadlineExceeded|reason[\"': ]{1,5}DeadlineExceeded|Job was active longer than specified deadline", "8", quiet=True),
    _row("pbs-time", F.TIME_LIMIT, .95, "walltime", r"job killed: walltime \d+ exceeded limit", "OpenPBS: mom"),
    _row("lsf-time", F.TIME_LIMIT, .95, "term_runlimit", r"TERM_RUNLIMIT: job killed after reaching LSF run time limit", "LSF: job reports"),
    _row("slurm-preempt", F.CANCELLED, .99, "due to", r"DUE TO (?:PREEMPTION|JOB REQUEUE)", "S", forms=SLURM),
    _row("slurm-node", F.NODE_LOST, .98, "node fail", r"DUE TO NODE FAILURE|Node failure on \S+", "S", forms=SLURM),
    _row("slurm-ume", F.GPU_HARDWARE, .6, "uncorrectable memory", r"UNCORRECTABLE MEMORY ERROR AT", "S", forms=SLURM),
    _row("slurm-io", F.NODE_LOST, .6, "lost", r"srun: error: .{0,60}(?:aborting, )?(?:io(?:_init_msg)? error on node|lost connection|Communication connection failure)", "S", forms=SLURM),
    _row("k8s-evict", F.CANCELLED, .95, "vict", r"\b(?:Reason|reason)[\"']?: +[\"']?(?:Evicted|Preempting|Preempted|PreemptionByScheduler|DeletionByTaintManager|EvictionByEvictionAPI|TerminationByKubelet)\b|The node was low on resource", "8", quiet=True),
    _row("k8s-preempt", F.CANCELLED, .95, "preempt", r"\b(?:Reason|reason)[\"']?: +[\"']?(?:Preempting|Preempted|PreemptionByScheduler)\b|Preempted by (?:pod )?\S+ on node", "8", quiet=True),
    _row("k8s-node", F.NODE_LOST, .95, "node", r"\b(?:Reason|reason)[\"']?: +[\"']?(?:NodeLost|NodeShutdown|NodeNotReady|Terminated due to imminent node shutdown)\b|Pod was terminated in response to imminent node shutdown", "8", quiet=True),
    _row("slurm-cancel", F.CANCELLED, .8, "cancelled at", r"\*\*\* (?:STEP|JOB) \S{1,40} (?:ON \S{1,80} )?CANCELLED AT \S{10,40} \*\*\*", "S", forms=SLURM),
    _row("slurm-forced", F.CANCELLED, .7, "terminated", r"srun: Force Terminated (?:job|StepId)", "S", forms=SLURM),
    _row("keyboard", F.CANCELLED, .75, "keyboardinterrupt", r"^KeyboardInterrupt\b", "P", forms=RAISED),
    _row("torchrun-signal", F.CANCELLED, .7, "got signal: 15", r"SignalException: Process \d+ got signal: (?:15|2)\b", "T", forms=RAISED | {Form.OTHER}),
    _row("ray-node", F.NODE_LOST, .9, "node", r"ray\.exceptions\.NodeDiedError|The node .{0,80}has been marked dead|actor died because its node has died|Its node has died", "R"),
    _row("panic", F.NODE_LOST, .95, "kernel panic", r"Kernel panic - not syncing", "K", forms=KERNEL),
    _row("k8s-image", F.NOT_STARTED, .9, "image", r"\b(?:ImagePullBackOff|ErrImagePull|ErrImageNeverPull|InvalidImageName)\b|Failed to pull image|Back-off pulling image", "8", quiet=True),
    _row("k8s-config", F.NOT_STARTED, .9, "createcontainer", r"\bReason: +CreateContainer(?:Config)?Error\b", "8", quiet=True),
    # network hardware
    _row("ib-async", F.NETWORK_HARDWARE, .85, "async", r"NET/IB ?: .{0,40}Got async (?:fatal )?(?:error )?event ?:? .{0,40}(?:port|device|fatal|local catas)", "N", forms=NCCL),
    _row("ib-completion", F.NETWORK_HARDWARE, .7, "got completion", r"NET/IB ?: ?Got completion (?:from peer .{0,80} )?with (?:status|error)", "N", forms=NCCL | {Form.OTHER}),
    _row("ib-retry", F.NETWORK_HARDWARE, .75, "retry", r"IBV_WC_RETRY_EXC_ERR|transport retry counter exceeded", "N"),
    _row("ibv-call", F.NETWORK_HARDWARE, .7, "ibv_", r"Call to ibv_\w{2,30} failed", "N", forms=NCCL),
    _row("no-route", F.NETWORK_HARDWARE, .8, "no route to host", _errno(113, "No route to host"), "K"),
    _row("unreachable", F.NETWORK_HARDWARE, .8, "network is", r"Network is (?:unreachable|down)\b", "K"),
    _row("nccl-socket", F.NETWORK_HARDWARE, .55, "socket", r"NCCL WARN .{0,80}(?:[Cc]onnect(?:ion)? .{0,60}(?:timed out|failed|refused)|no socket interface found|Bootstrap : no socket)", "N", forms=NCCL),
    _row("nccl-no-interface", F.NETWORK_HARDWARE, .55, "no socket interface", r"Bootstrap : no socket interface found", "N"),
    _row("link-down", F.NETWORK_HARDWARE, .8, "link", r"(?:mlx5_core|bnxt_en|ice) \S+ .{0,40}(?:Link down|NIC Link is [Dd]own)", "K", forms=KERNEL),
    # collectives
    _row("gloo-size", F.COLLECTIVE_MISMATCH, .9, "distributed collective mismatch", r"Received data size doesn't match expected size", "G"),
    _row("detail-mismatch", F.COLLECTIVE_MISMATCH, .97, "mismatch between collectives", r"Detected mismatch between collectives on ranks", "T"),
    _row("nccl-mismatch", F.COLLECTIVE_MISMATCH, .6, "mismatch", r"NCCL WARN .{0,120}[Mm]ismatch(?:ed)? .{0,60}(?:collective|size|count|op)|[Mm]essage truncated : received", "N", forms=NCCL),
    _row("ddp-params", F.COLLECTIVE_MISMATCH, .85, "verif", r"Params .{0,60}appears not to match sizes of the same param in process|DDP expects same model across all ranks", "T"),
    _row("watchdog", F.COLLECTIVE_TIMEOUT, .9, "watchdog caught collective operation timeout", r"Watchdog caught collective operation timeout", "T"),
    _row("watchdog-work", F.COLLECTIVE_TIMEOUT, .85, "timeout at", r"Timeout at (?:NCCL|collective) work|Timeout at collective: ", "T"),
    _row("gloo-timeout", F.COLLECTIVE_TIMEOUT, .85, "timed out waiting", r"Timed out waiting \d+ms for (?:send|recv) operation", "G"),
    _row("monitored", F.COLLECTIVE_TIMEOUT, .9, "monitoredbarrier", r"failed to pass monitoredBarrier in|timed out in monitoredBarrier", "T"),
    _row("heartbeat", F.COLLECTIVE_TIMEOUT, .6, "heartbeat", r"heartbeat monitor|Heartbeat monitor timed out|process group watchdog .{0,60}(?:stuck|hang)", "T"),
    _row("store-timeout", F.COLLECTIVE_TIMEOUT, .6, "timeout", r"wait timeout after \d+ms, keys:|Socket Timeout\b|client socket has timed out after|Timed out after \d+ seconds waiting for clients", "T"),
    _row("xla-rendezvous", F.COLLECTIVE_TIMEOUT, .75, "rendezvous", r"Termination timeout for .{0,120}exceeded|(?:stuck|Expected \d+ threads to join).{0,120}rendezvous|Timed out waiting for .{0,80}(?:barrier|participants)|Barrier timed out", "X"),
    _row("jax-coordination", F.COLLECTIVE_TIMEOUT, .6, "deadline_exceeded", r"DEADLINE_EXCEEDED: .{0,160}", "X"),
    _row("megatron-ft", F.COLLECTIVE_TIMEOUT, .7, "timed out", r"(?:Did not get (?:initial|subsequent) heartbeat|section .{0,40}timed out|No heartbeat from rank)", "D"),
    _row("vllm-mq", F.COLLECTIVE_TIMEOUT, .5, "timed out", r"RPC call to \w+ timed out|TimeoutError: RPC call", "vLLM: vllm/v1/executor/multiproc_executor.py"),
    _row("watchdog-stuck", F.COLLECTIVE_TIMEOUT, .7, "got stuck for", r"watchdog got stuck for \d+ seconds", "T"),
    _row("dump-signal", F.COLLECTIVE_TIMEOUT, .6, "dump signal", r"dump signal .{0,60}(?:collective )?timeout", "T"),
    # the program
    _row("nccl-cuda", F.PROGRAM, .55, "cuda failure", r"Cuda failure (?:\d+ )?'", "N"),
    _row("cuda-assert", F.PROGRAM, .9, "device-side assert", r"device-side assert triggered|CUDA_ERROR_ASSERT", "C"),
    _row("cuda-illegal", F.PROGRAM, .75, "cuda", r"an illegal memory access was encountered|CUDA_ERROR_ILLEGAL_ADDRESS|misaligned address|an illegal instruction was encountered|invalid (?:device function|configuration argument|argument)|no kernel image is available|unspecified launch failure|CUDA_ERROR_LAUNCH_FAILED", "C"),
    _row("loader-caught", F.PROGRAM, .92, "in dataloader worker", r"Caught \w+ in DataLoader worker process", "T"),
    _row("replica-caught", F.PROGRAM, .9, "in replica", r"Caught \w+ in replica \d+ on device", "T"),
    _row("segfault", F.PROGRAM, .85, "segmentation fault", r"Segmentation fault|Fatal Python error: ", "P"),
    _row("segfault-handler", F.PROGRAM, .85, "*** signal", r"\*\*\* (?:SIGSEGV|SIGBUS|SIGILL|SIGFPE|Process received signal)|Caught signal 11", "glog, UCX: signal handlers"),
    _row("fatal-python", F.PROGRAM, .8, "fatal python error", r"Fatal Python error: ", "P"),
    _row("ddp-unused", F.PROGRAM, .95, "expected to have finished reduction", r"Expected to have finished reduction in the prior iteration", "T"),
    _row("argparse", F.PROGRAM, .85, "error: ", r"^[\w./-]{1,80}\.py: error: ", "P"),
    _row("import", F.PROGRAM, .93, "no module named", r"No module named '", "P", forms=RAISED),
    _row("loader-lib", F.PROGRAM, .8, "cannot open shared object", r"cannot open shared object file|undefined symbol: ", "glibc: ld.so"),
    _row("address-in-use", F.PROGRAM, .8, "address already in use", _errno(98, "Address already in use"), "K"),
    # consequences: something died elsewhere
    _row("gloo-closed", F.PEER_DIED, .8, "closed by peer", r"Connection closed by peer", "G", role=_C),
    _row("reset", F.PEER_DIED, .7, "reset by peer", r"[Cc]onnection reset by peer|ConnectionResetError", "K", role=_C),
    _row("broken-pipe", F.PEER_DIED, .6, "broken pipe", r"Broken pipe|BrokenPipeError", "K", role=_C),
    _row("nccl-remote", F.PEER_DIED, .75, "remote", r"ncclRemoteError|remote process exited or there was a network error|Connection closed by remote peer", "N", role=_C),
    _row("nccl-system", F.PEER_DIED, .5, "ncclsystemerror", r"ncclSystemError: System call", "T", role=_C),
    _row("nccl-aborted", F.PEER_DIED, .5, "communicator was aborted", r"NCCL communicator was aborted", "T", role=_C),
    _row("store-gone", F.PEER_DIED, .6, "recvvalue", r"recvValue(?:WithTimeout)? failed on|failed to recv, got 0 bytes|sendBytes failed", "T", role=_C),
    _row("refused", F.PEER_DIED, .5, "refused", r"[Cc]onnection refused|ConnectionRefusedError", "K", role=_C),
    _row("refused-eof", F.PEER_DIED, .4, "eoferror", r"^EOFError\b", "P", role=_C, forms=RAISED),
    _row("nccl-teardown", F.PEER_DIED, .3, "taking the entire process down", r"we are taking the entire process down", "T", role=_C),
    _row("xla-peer", F.PEER_DIED, .6, "unavailable", r"UNAVAILABLE: .{0,200}(?:[Ss]ocket closed|[Cc]onnection|heartbeat|Task .{0,60}(?:disconnected|unhealthy))|another task died|is unhealthy because", "X", role=_C),
    _row("ray-actor", F.PEER_DIED, .6, "died", r"ray\.exceptions\.(?:RayActorError|ActorDiedError|WorkerCrashedError|ActorUnavailableError)|The actor died unexpectedly before finishing|A worker died or was killed", "R", role=_C),
    _row("engine-dead", F.PEER_DIED, .4, "engine", r"EngineDeadError|EngineCore (?:encountered an issue|failed to start)|Engine core (?:initialization failed|proc .{0,40}died)|WorkerProc initialization failed|WorkerProc.{0,40}died", "vLLM: vllm/v1/engine", role=_C),
    _row("child-failed", F.PEER_DIED, .3, "failed", r"ChildFailedError|ProcessExitedException|ProcessRaisedException", "T", role=_C),
    _row("called-process", F.PEER_DIED, .3, "returned non-zero exit status", r"CalledProcessError: |returned non-zero exit status", "P", role=_C),
    _row("rank-closing", F.PEER_DIED, .3, "closing signal", r"Sending process \d+ closing signal", "T", role=_C, quiet=True),
    _row("deepspeed-kill", F.PEER_DIED, .3, "killing subprocess", r"Killing subprocess \d+", "D", role=_C, quiet=True),
    _row("step-aborted", F.PEER_DIED, .3, "job step aborted", r"srun: (?:launch/slurm: \S+ )?Job step aborted|Terminating (?:job step|StepId)", "S", role=_C, forms=SLURM),
    _row("loader-exited", F.PEER_DIED, .5, "exited unexpectedly", r"DataLoader worker \(pid\(s\) .{0,60}\) exited unexpectedly", "T", role=_C),
)
# fmt: on

MEANS = {
    "cuda-802": "CUDA error 802: the node's NVSwitch fabric is not ready; check nvidia-fabricmanager on the node",
}  # what a line that names no cause asks to look at
BY_ID = {rule.id: rule for rule in RULES}
_NEEDLES = re.compile("|".join(sorted({re.escape(rule.needle) for rule in RULES}, key=len, reverse=True)))


def matches(text: str, form: Form) -> list[Rule]:
    """Return the rules that a line fulfils, causes first, the surest first."""
    lower = text.lower()
    if not _NEEDLES.search(lower):
        return []
    found = [r for r in RULES if form in r.forms and r.needle in lower and r.pattern.search(text)]
    return sorted(found, key=lambda rule: (rule.role is not Role.CAUSE, -rule.confidence))
