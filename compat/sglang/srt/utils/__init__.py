"""What frameworks take from here: all of it is in `common` and `network`."""

from sglang.srt.utils.common import (
    MultiprocessingSerializer as MultiprocessingSerializer,
    add_prometheus_middleware as add_prometheus_middleware,
    assert_pkg_version as assert_pkg_version,
    get_device as get_device,
    get_ip as get_ip,
    get_open_port as get_open_port,
    init_custom_process_group as init_custom_process_group,
    is_cuda as is_cuda,
    is_hip as is_hip,
    kill_process_tree as kill_process_tree,
    maybe_set_triton_cache_manager as maybe_set_triton_cache_manager,
    set_prometheus_multiproc_dir as set_prometheus_multiproc_dir,
    set_ulimit as set_ulimit,
    suppress_noisy_warnings as suppress_noisy_warnings,
)
from sglang.srt.utils.network import get_zmq_socket as get_zmq_socket
