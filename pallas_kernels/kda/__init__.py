from pallas_kernels.kda.api import kda as kda
