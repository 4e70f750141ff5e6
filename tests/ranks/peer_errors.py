"""What PyTorch raises where a rank has lost its peers, and what for reasons of its own."""

import torch
import torch.distributed as dist

GLOO = "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/"
NCCL = "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, "
WATCHDOG = (
    "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1242, OpType=ALLREDUCE,"
    " NumelIn=1048576, NumelOut=1048576, Timeout(ms)=600000) ran for 600021 milliseconds before"
    " timing out."
)
Nccl, Net, Stored = dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError
LOST: dict[str, Exception] = {
    "gloo, killed": RuntimeError(
        f"{GLOO}pair.cc:537] Read error [127.0.0.1]:25505: Connection reset by peer. This is "
        "typically caused by a remote worker hanging or bugs in the application."
    ),
    "gloo, ended": RuntimeError(
        f"{GLOO}pair.cc:553] Connection closed by peer [127.0.0.1]:35540. This is typically caused "
        "by a remote worker crashing."
    ),
    "gloo, stopped": RuntimeError(
        f"{GLOO}unbound_buffer.cc:78] Timed out waiting 4000ms for recv operation to complete"
    ),
    "gloo, writing": RuntimeError(f"{GLOO}pair.cc:480] writev [127.0.0.1]:7: Broken pipe"),
    "store": Stored("wait timeout after 4000ms, keys: /default_pg/0//never"),
    "store, away": Net("The client socket has timed out after 60000ms, trying (host1, 29400)."),
    "store, ended": Net("failed to recv, got 0 bytes"),
    "NCCL, gone": Nccl(
        f"{NCCL}remote process exited or there was a network error, NCCL version 2.27.7\n"
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting"
        " prematurely.\nLast error:\nsocketProgress: Connection closed by remote peer host1<40772>"
    ),
    "NCCL, refused": Nccl(
        f"{NCCL}unhandled system error\nncclSystemError: System call (e.g. socket, malloc) or "
        "external library call failed or device error.\nLast error:\n"
        "socketStartConnect: Connect to 10.0.0.2<43581> failed : Connection refused"
    ),
    "NCCL, watchdog": Nccl(WATCHDOG),
    "NCCL, aborted": RuntimeError(f"NCCL communicator was aborted on rank 0. {WATCHDOG}"),
}
OWN: dict[str, Exception] = {
    "two on one GPU": Nccl(
        f"{NCCL}invalid usage, NCCL version 2.27.7\nncclInvalidUsage: This usually reflects "
        "invalid usage of NCCL library.\nLast error:\n"
        "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000"
    ),
    "NCCL, no memory": Nccl(
        f"{NCCL}unhandled cuda error\nncclUnhandledCudaError: Call to CUDA function failed.\n"
        "Last error:\nCuda failure 2 'out of memory'"
    ),
    "NCCL, /dev/shm": Nccl(
        f"{NCCL}unhandled system error\nncclSystemError: System call (e.g. socket, malloc) or "
        "external library call failed or device error.\nLast error:\nError while creating shared "
        "memory segment /dev/shm/nccl-dh4Bfk (size 9637888), error: No space left on device (28)"
    ),
    "NCCL, different": Nccl(
        f"{NCCL}internal error\nncclInternalError: Internal check failed.\nLast error:\n"
        "Message truncated : received 1024 bytes instead of 256"
    ),
    "a GPU's memory": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB"),
    "a GPU": RuntimeError("CUDA error: the launch timed out and was terminated"),
    "a user's server": ConnectionResetError("Connection reset by peer"),
    "a user's words": RuntimeError("the socket to my data server timed out"),
}
