"""What frameworks take from here: all of it is in `common` and `network`."""

from sglang.srt.utils.common import MultiprocessingSerializer as MultiprocessingSerializer
from sglang.srt.utils.common import add_prometheus_middleware as add_prometheus_middleware
from sglang.srt.utils.common import assert_pkg_version as assert_pkg_version
from sglang.srt.utils.common import get_device as get_device
from sglang.srt.utils.common import get_ip as get_ip
from sglang.srt.utils.common import get_open_port as get_open_port
from sglang.srt.utils.common import init_custom_process_group as init_custom_process_group
from sglang.srt.utils.common import is_cuda as is_cuda
from sglang.srt.utils.common import is_hip as is_hip
from sglang.srt.utils.common import kill_process_tree as kill_process_tree
from sglang.srt.utils.common import maybe_set_triton_cache_manager as maybe_set_triton_cache_manager
from sglang.srt.utils.common import set_prometheus_multiproc_dir as set_prometheus_multiproc_dir
from sglang.srt.utils.common import set_ulimit as set_ulimit
from sglang.srt.utils.common import suppress_noisy_warnings as suppress_noisy_warnings
from sglang.srt.utils.network import get_zmq_socket as get_zmq_socket
