from pallas_kernels.kda.api import kda as kda
from pallas_kernels.kda.inputs import log_decay as log_decay
