"""Settings of Grappler, which optimizes TensorFlow's graphs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tensorflow.core.protobuf.config_pb2 import ConfigProto
from tensorflow.core.protobuf.rewriter_config_pb2 import RewriterConfig
from tensorflow.python.eager import context


@contextlib.contextmanager
def sums_in_order() -> Iterator[None]:
    """Let functions that this thread calls for the first time in a block add terms in their order.

    Where Grappler takes a device's memory for short (of a CPU it counts on 256 MB), it turns sums
    of three terms and more into additions in whatever order the terms come.
    """
    now = context.context()
    before = now.function_call_options
    config = ConfigProto.FromString(before.config_proto_serialized)
    config.graph_options.rewrite_options.memory_optimization = RewriterConfig.NO_MEM_OPT
    now.function_call_options = context.FunctionCallOptions(before.executor_type, config)
    try:
        yield
    finally:
        now.function_call_options = before
