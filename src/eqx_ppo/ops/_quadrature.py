r"""Fixed quadrature nodes.

`HERMITE_*`: 12 nodes for $E f(z)$ with $z \sim N(0, 1)$ (Gauss-Hermite, weights sum to 1).

`SOFTPLUS_*`: 8 Gauss nodes on $[0, \infty)$ for the weight function $\log(1 + e^{-2u})$. They
follow from its moments $k!\, \eta(k + 2) / 2^{k + 1}$ (with $\eta$ the Dirichlet eta function)
by Chebyshev's algorithm and the Golub-Welsch eigenvalue problem, in 60-digit arithmetic; they
integrate polynomials up to degree 15 exactly.
"""

import numpy as np

_nodes, _weights = np.polynomial.hermite_e.hermegauss(12)
HERMITE_NODES = _nodes.astype(np.float32)
HERMITE_WEIGHTS = (_weights / _weights.sum()).astype(np.float32)

SOFTPLUS_NODES = np.array(
    [
        0.090289199647453348,
        0.47080444142841975,
        1.1508394220639164,
        2.1570725606995903,
        3.5446388366610611,
        5.4000130903016932,
        7.8906564604312231,
        11.45162409804096,
    ],
    dtype=np.float32,
)
SOFTPLUS_WEIGHTS = np.array(
    [
        0.14018485791490639,
        0.17418135754175292,
        0.079727326679655599,
        0.015759798442760118,
        0.0013362436990469214,
        4.3524583313571579e-5,
        4.0734724961629029e-7,
        5.0337147628639538e-10,
    ],
    dtype=np.float32,
)
