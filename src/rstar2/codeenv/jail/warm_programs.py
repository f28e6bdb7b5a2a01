"""The programs of the warm-up, by flavour. Each block, up to an empty line, is one program.

They use what models write most, so that calls find modules imported, caches filled and code
specialised. No benchmark measures them (benchmarks/codeenv.py checks it). A program must leave
global settings (precision, print options) as it found them: calls inherit them.
"""

FAILING = r"""
int('seven')

[1, 2][5]

print('unfinished'
"""
"""Programs that fail: models see tracebacks too."""

PLAIN = r"""
print('hello', 7 * 6)

total = 0
for i in range(1000):
    total += i * i % 7
print(f'{total:>8} {total / 3:.4f}')

2 ** 100

import bisect, cmath, copy, dataclasses, datetime, heapq, itertools, json, math, operator, random
import re, statistics, string
from fractions import Fraction
from decimal import Decimal
from collections import Counter, defaultdict, deque
from functools import lru_cache, reduce
print(math.gcd(12, 18), math.lcm(4, 6), math.factorial(10), math.comb(5, 2), math.perm(5, 2))
print(math.isqrt(17), math.sqrt(2), math.pi, math.e, math.log(8, 2), math.floor(2.5))
print(math.ceil(2.5), math.sin(1.0), math.atan2(1, 1), math.hypot(3, 4), math.prod([1, 2, 3]))
print(math.isclose(0.1 + 0.2, 0.3), math.inf, cmath.sqrt(-1))
print(list(itertools.combinations(range(4), 2)), list(itertools.product([0, 1], repeat=2)))
print(list(itertools.permutations([1, 2, 3]))[:2], list(itertools.accumulate([1, 2, 3])))
print(list(itertools.chain([1], [2])), list(itertools.groupby('aab')))
print(list(itertools.islice(itertools.count(), 3)))
print(list(itertools.combinations_with_replacement([1, 2], 2)))
print(Fraction(1, 3) + Fraction(1, 6), Fraction(7, 2).numerator)
print(Decimal('0.1') + Decimal('0.2'), Counter('abracadabra').most_common(2), defaultdict(int))
print(deque([1, 2], maxlen=2), statistics.mean([1, 2, 3]), statistics.stdev([1, 2, 3]))
print(heapq.nsmallest(2, [3, 1, 2]), bisect.bisect([1, 2, 3], 2), re.findall(r'\d+', 'a1b22'))
print(re.sub('a', 'b', 'aa'), json.dumps({'a': [1, 2.5, None]}), json.loads('{"x": 1}'))
print(datetime.date(2024, 2, 29).weekday())
print(datetime.datetime(2024, 1, 1) - datetime.datetime(2023, 1, 1))
@lru_cache(maxsize=None)
def fib(n):
    return n if n < 2 else fib(n - 1) + fib(n - 2)
print(fib(50), reduce(lambda u, v: u * v, [1, 2, 3, 4]), [x**2 for x in range(5) if x % 2])
print({k: v for k, v in zip('ab', [1, 2])}, {i % 3 for i in range(9)})
print(sorted([3, 1, 2], key=lambda v: -v, reverse=True), list(map(str, [1, 2])))
print(list(filter(None, [0, 1])), any([0, 1]), all([1]), sum(range(10)), max([1, 5]))
print(min(3, 2), abs(-1), round(2.675, 2), divmod(17, 5), pow(2, 10, 1000), hex(255), bin(10))
print(oct(8), int('ff', 16), chr(97), ord('a'), list(enumerate('ab')), list(reversed([1, 2])))
print(tuple([1]), set([1]), frozenset([1]), isinstance(1, int), type(1).__name__)
print('a,b'.split(','), ' x '.strip(), 'abc'.upper(), 'abc'[::-1], 'a'.join(['1', '2']))
print('x{:.2f}'.format(1.5), '%d' % 3, f'{1/3:.3e} {10:>5} {"s"!r}', 'abc'.replace('a', 'b'))
print('abc'.find('c'), 'abc'.startswith('a'), '12'.isdigit(), '12'.zfill(4))
class Point:
    def __init__(self, x, y):
        self.x, self.y = x, y
    def __add__(self, other):
        return Point(self.x + other.x, self.y + other.y)
    def __repr__(self):
        return f'Point({self.x}, {self.y})'
@dataclasses.dataclass
class Node:
    value: int
    children: list = dataclasses.field(default_factory=list)
def generator():
    for i in range(3):
        yield i
try:
    raise ValueError('x')
except ValueError as error:
    print(error, Point(1, 2) + Point(3, 4), Node(1), list(generator()))
finally:
    pass
with open('/dev/null') as file:
    file.read()
primes = [p for p in range(2, 100) if all(p % q for q in range(2, int(p**0.5) + 1))]
dp = [[0] * 5 for _ in range(5)]
for i in range(5):
    for j in range(5):
        dp[i][j] = (dp[i-1][j] if i else 0) + (dp[i][j-1] if j else 0) or 1
grid = {(i, j): i * j for i in range(3) for j in range(3)}
seen, stack = set(), [0]
while stack:
    node = stack.pop()
    if node in seen or node > 8: continue
    seen.add(node); stack.extend([2 * node + 1, 2 * node + 2])
print(primes[-1], dp[4][4], len(grid), sorted(seen), sum(int(d) for d in str(2**100)))
print(random.Random(0).random(), copy.deepcopy([1, [2]]), string.ascii_lowercase[:3])
print(operator.itemgetter(1)([1, 2]))
"""

NUMPY = r"""
import numpy as np
a = np.arange(16.0).reshape(4, 4) + np.eye(4)
print(np.linalg.det(a), np.linalg.solve(a, np.ones(4)), np.linalg.eigvals(a))
print((a @ a).sum(axis=0), a.mean(), np.sort(a.ravel())[:3])

import numpy as np
a = np.array([[4.0, 1.0], [2.0, 3.0]])
b = np.arange(12).reshape(3, 4)
print(np.linalg.eig(a), np.linalg.eigvalsh(a + a.T), np.linalg.inv(a), np.linalg.svd(a))
print(np.linalg.matrix_rank(a), np.linalg.norm(a), np.linalg.qr(a))
print(np.linalg.cholesky(a @ a.T), np.linalg.lstsq(b, np.ones(3), rcond=None)[0])
print(np.linalg.pinv(a), np.linalg.matrix_power(a, 3), np.linalg.eigh(a @ a.T))
print(np.linalg.solve(a, [1.0, 2.0]), np.linalg.det(a), np.linalg.slogdet(a), np.trace(a))
print(b.T, b[:, 1], b[b > 5], b[::-1], b.sum(axis=1), b.max(), b.argmax(), b.std())
print(b.var(axis=0), b.mean(axis=1), np.median(b), np.percentile(b, 25), np.cumsum(b))
print(np.cumprod([1, 2, 3]), np.diff([1, 4, 9]), np.prod([2, 3]), b.dtype, b.shape)
print(b.astype(float), b.tolist(), b.ravel(), b.flatten(), np.transpose(b))
print(np.where(b > 3, b, 0), np.unique([1, 1, 2], return_counts=True), np.sort([3, 1, 2]))
print(np.argsort([3, 1, 2]), np.concatenate([[1], [2]]), np.vstack([[1], [2]]))
print(np.hstack([[1], [2]]), np.stack([[1], [2]]), np.linspace(0, 1, 5))
print(np.meshgrid([1, 2], [3, 4]), np.outer([1, 2], [3, 4]), np.dot([1, 2], [3, 4]))
print(np.cross([1, 0, 0], [0, 1, 0]), np.kron([1, 2], [1, 1]), np.einsum('ij,jk->ik', a, a))
print(np.tensordot(a, a), np.zeros((2, 2)), np.ones(3), np.full(2, 7), np.eye(2))
print(np.diag([1, 2]), np.tile([1], 3), np.repeat([1, 2], 2), np.roll([1, 2, 3], 1))
print(np.flip([1, 2]))
print(np.roots([1, -3, 2]), np.polyfit([0, 1, 2], [0, 1, 4], 2), np.polyval([1, 0], 3))
print(np.poly1d([1, 2, 3]), np.poly([1, 2]), np.convolve([1, 2], [1, 1]))
print(np.interp(0.5, [0, 1], [0, 10]))
print(np.gradient([1.0, 4.0, 9.0]))
print(np.histogram([1, 2, 2], bins=3), np.bincount([0, 1, 1]), np.isclose(0.1 + 0.2, 0.3))
print(np.allclose([1.0], [1.0]), np.isnan(np.nan), np.gcd(12, 18), np.lcm(4, 6), np.mod(7, 3))
print(np.sqrt([4.0]), np.exp(1.0), np.log([1.0]), np.sin(np.pi), np.floor(2.5))
print(np.round(2.567, 2), np.abs([-1]), np.sign(-2), np.power(2, 3), np.clip([5], 0, 3))
print(np.any([True]), np.all([True]), np.count_nonzero([1, 0]), np.nonzero([0, 1]))
print(np.corrcoef([1, 2, 3], [1, 2, 4]), np.cov([1, 2], [3, 4]))
print(np.array2string(a, precision=2), np.float64(1.5), np.int64(3), np.arange(0, 1, 0.25))
print(np.triu(a), np.tril(a), np.searchsorted([1, 3], 2), np.array_equal(a, a))
print(np.vectorize(lambda v: v + 1)([1, 2]), np.apply_along_axis(sum, 0, a))
print(np.maximum([1], [2]), np.argmin([2, 1]), np.nanmean([1.0, np.nan]))
print(np.average([1, 2], weights=[1, 3]), np.ndindex(2), np.iinfo(int).max)
print(np.finfo(float).eps, np.bitwise_and(6, 3), np.inner([1, 2], [1, 2]), np.vdot([1], [2]))
print(np.get_printoptions())
for v in np.nditer(b): pass
a += 1
a *= 2
c = a.copy()
c[0, 0] = 5
print(c, a == c, (a < c).any(), a / c, a ** 2, -a, a // 2, a % 3, a @ c)
"""

SYMPY = r"""
from sympy import symbols, solve, simplify, expand, factor, Rational
x = symbols('x')
print(solve(2*x**2 + x - 15, x), solve([x + 3], [x]))
print(expand((x + 1)**3), factor(x**2 - 1), simplify((x**2 - 1)/(x - 1)))
print(Rational(3, 7) + Rational(1, 2))

import sympy as sp
n, k = sp.symbols('n k', integer=True, positive=True)
print(sp.factorint(360), sp.isprime(97), sp.gcd(12, 18), sp.binomial(10, 3))
print(sp.summation(k, (k, 1, n)), sp.sqrt(8), sp.N(sp.pi, 20))
print(sp.diff(sp.sin(n)**2, n), sp.integrate(n**2, n), sp.Matrix([[1, 2], [3, 4]]).det())
"""

MORE_SYMPY = r"""
from sympy import *
x, y, z, t = symbols('x y z t')
a, b, c = symbols('a b c', positive=True)
print(limit(sin(5*x)/(2*x), x, 0), limit((1 + 2/x)**x, x, oo))
print(limit((sqrt(x + 1) - 1)/x, x, 0), limit(x*log(x), x, 0, '+'))
print(series(cos(x)*exp(x), x, 0, 5), series(log(1 + x), x, 0, 4))
print(series(1/(1 - x), x, 0, 4).removeO())

from sympy import *
x, y, t = symbols('x y t')
print(integrate(x*exp(x), x), integrate(1/(x**2 + 4), x), integrate(sin(x)**3, x))
print(integrate(x*log(x), (x, 1, 2)))
print(integrate(exp(-3*x), (x, 0, oo)), integrate(exp(-x**2), (x, -oo, oo)))
print(integrate(sqrt(9 - x**2), (x, -3, 3)))
print(integrate(x*y, (x, 0, y), (y, 0, 1)), integrate(1/(x*(x + 1)), x), integrate(tan(x), x))
print(integrate(x/(x**4 + 1), x))
print(Integral(cos(x), x).doit(), integrate(abs(x - 1), (x, 0, 3)))

from sympy import *
x, y, z = symbols('x y z')
print(solve(x**3 - 2*x + 1, x), solve(x**4 - 5*x**2 + 4, x))
print(solve([x + y - 5, x - y - 1], [x, y]), solve(exp(x) - 3, x))
print(solve([x**2 + y**2 - 13, x - y - 1], [x, y]), solve(sqrt(x + 3) - x + 3, x))
print(solve(log(x) + log(x - 2) - log(3), x), solve(Eq(2**x, 16), x))
print(linsolve([x + 2*y - z - 3, 2*x - y + z - 1, x + y + z - 6], x, y, z))
print(nonlinsolve([x*y - 6, x + y - 5], [x, y]), solveset(x**2 + 1, x))
print(solveset(cos(x), x, Interval(0, 2*pi)))
print(solve(sin(x) - 1, x), roots(x**3 - 6*x**2 + 11*x - 6, x), nroots(x**3 - x - 1))
print(real_roots(x**3 - 2), nsolve(exp(-x) - x, x, 1))
print(solve(x**2 + y*x + 1, x))
print(solve([x + y + z - 6, x*y + y*z + z*x - 11, x*y*z - 6], [x, y, z]))

from sympy import *
x = symbols('x', real=True)
n, k, m = symbols('n k m', integer=True)
print(solve_univariate_inequality(x**2 - x - 6 > 0, x))
print(reduce_inequalities([2*x - 1 >= 3, x < 10], x), solve(x**2 - 9 <= 0, x))
print(solve((x - 1)*(x + 2) > 0, x))
print(Interval(0, 5).intersect(Interval.open(3, 8)), Union(FiniteSet(1, 2), Interval(4, 5)))
print(FiniteSet(1, 2, 3) - FiniteSet(2), solveset(x**2 < 5, x, S.Reals))
print(ImageSet(Lambda(k, 2*k), S.Integers))
print(Piecewise((x, x > 0), (0, True)).subs(x, 3), Max(x, 2).subs(x, 5), Min(1, x))
print(floor(Rational(7, 2)), ceiling(2.3), sign(-3), Heaviside(2))

from sympy import *
x, y = symbols('x y')
print(trigsimp(sin(x)**4 - cos(x)**4), simplify(tan(x)*cos(x)), expand_trig(sin(x + y)))
print(expand_trig(cos(2*x)), simplify(sin(x)*cos(y) + cos(x)*sin(y)), fu(sin(x)*cos(x)))
print(simplify((x**3 - 1)/(x - 1)), radsimp(1/(sqrt(3) + sqrt(2))), powsimp(x**2*x**3))
print(logcombine(log(2) + log(3), force=True), expand_log(log(x*y), force=True))
print(nsimplify(0.75), sqrtdenest(sqrt(3 + 2*sqrt(2))))
print(cancel((x**2 + 2*x + 1)/(x + 1)), apart(1/(x**2 - 3*x + 2), x), together(1/x + 1/y))
print(collect(x*y + x - 3 + 2*x**2, x), ratsimp(1/x + 1/y), combsimp(binomial(x, 3)))
print(gammasimp(gamma(x + 1)/gamma(x)), simplify(sqrt(x**2)), besselj(0, x).diff(x))
print(sin(pi/12).rewrite(sqrt), cos(pi/5), tan(pi/8), asin(Rational(1, 2)), atan(1))
print(simplify(cos(pi/7)*cos(2*pi/7)*cos(3*pi/7)), N(sin(1)))
print(minimal_polynomial(sqrt(2) + sqrt(3), x), Abs(3 + 4*I), arg(1 + I), re(exp(I*pi/3)))
print(expand((1 + I)**5, complex=True))

from sympy import *
x, y = symbols('x y')
p = Poly(x**4 - 3*x**2 + 2*x - 1, x)
print(p.degree(), p.all_coeffs(), p.discriminant(), resultant(x**2 - 1, x - 2, x))
print(gcd(x**2 - 1, x**2 - 3*x + 2), lcm(x - 1, x**2 - 1), div(x**3 - 1, x - 1))
print(rem(x**5, x**2 + 1), quo(x**3, x))
print(factor(x**4 + 4), factor_list(x**6 - 1), factor(x**2*y - y))
print(groebner([x*y - 1, x**2 + y**2 - 4], x, y), Poly(x**2 - 2).nroots())
print(sqf_list(x**3 - x**2), factor(x**2 + 1, gaussian=True), interpolate([1, 4, 9], x))
print(symmetrize(x**2 + y**2), horner(x**3 + 2*x + 1), Poly(x**3 + x, modulus=5))
print(cyclotomic_poly(6, x), degree(x**3 + 1), Poly(x**2 + 3*x, x).eval(4), p.real_roots()[:1])
print(count_roots(x**3 - x))

from sympy import *
from sympy.ntheory.modular import crt
from sympy.solvers.diophantine import diophantine
from sympy.ntheory import digits, discrete_log, egyptian_fraction, is_quad_residue, multiplicity
from sympy.ntheory import n_order, perfect_power, primitive_root, sqrt_mod
from sympy.ntheory.continued_fraction import continued_fraction
print(factorint(123456), list(primerange(1, 40)), prime(30), nextprime(200), prevprime(200))
print(primepi(100), isprime(2**31 - 1), divisors(60), divisor_count(84), divisor_sigma(28))
print(totient(36), mobius(30), gcd(48, 180), lcm(12, 18), igcd(6, 9), mod_inverse(3, 11))
print(crt([3, 5, 7], [2, 3, 2]), n_order(2, 7), primitive_root(11), is_quad_residue(2, 7))
print(sqrt_mod(4, 11), jacobi_symbol(2, 15), discrete_log(41, 15, 7), primefactors(210))
print(factorial(12), fibonacci(20), lucas(7), catalan(5), bernoulli(6), harmonic(5))
print(binomial(12, 5), bell(5), partition(10), digits(1234), multiplicity(2, 48))
print(perfect_power(64), integer_nthroot(100, 2), reduced_totient(15))
u, v = symbols('u v', integer=True)
print(diophantine(4*u + 7*v - 3), diophantine(u**2 - 2*v**2 - 1))
print(diophantine(u**2 + v**2 - 25), diophantine(u*v - 6))
print(continued_fraction(Rational(45, 16)), Rational(22, 7).limit_denominator(5))
print(egyptian_fraction(Rational(5, 6)), factorint(10**12 + 39), pow(3, 100, 7))

from sympy import *
n, k, i, j = symbols('n k i j', integer=True, positive=True)
x = symbols('x')
print(summation(k**2, (k, 1, n)), summation(1/k**2, (k, 1, oo)), Sum(k**3, (k, 1, 10)).doit())
print(product(k, (k, 1, 5)), Product(1 - 1/k**2, (k, 2, n)).doit())
print(summation(Rational(1, 2)**k, (k, 0, oo)), summation(k*2**k, (k, 1, n)))
print(summation(binomial(n, k), (k, 0, n)), summation(1/(k*(k + 1)), (k, 1, n)))
print(Sum(1/factorial(k), (k, 0, oo)).doit())
f = Function('f')
print(rsolve(f(n) - f(n - 1) - f(n - 2), f(n), {f(0): 0, f(1): 1}))
print(factor(summation(k**3, (k, 1, n))), simplify(factorial(n + 1)/factorial(n)), zeta(2))
print(gamma(Rational(1, 2)), harmonic(n).subs(n, 4))

from sympy import *
x, y, lam = symbols('x y lambda')
M = Matrix([[1, 2, 0], [2, 1, 1], [0, 1, 3]])
print(M.det(), M.inv(), M.T, M*M, M**3, M.rref(), M.rank(), M.eigenvals(), M.trace())
print(M.charpoly(lam).as_expr(), M.nullspace(), M[0, :], M.shape, M.applyfunc(lambda v: v + 1))
print(M.adjugate(), M.LUsolve(Matrix([1, 2, 3])))
A = Matrix([[2, 1], [1, 2]])
print(A.eigenvects(), A.diagonalize(), A.jordan_form(), A.norm(), eye(2))
print(zeros(2, 3), ones(2), diag(1, 2), Matrix([[x, y], [1, x]]).det())
print(Matrix([1, 2, 3]).dot(Matrix([4, 5, 6])), Matrix([1, 2, 3]).cross(Matrix([4, 5, 6])))
print(A.columnspace(), A.is_symmetric(), Matrix([x*y, x + y]).jacobian([x, y]))
print(hessian(x**2*y, [x, y]), A.solve(Matrix([1, 0])))
print(GramSchmidt([Matrix([1, 1]), Matrix([1, 0])]), Matrix(2, 2, lambda r, s: r + s))
print(Matrix.hstack(A, A), A.row_join(Matrix([1, 1])), A.QRdecomposition())
print(A.singular_values(), A.LUdecomposition())

from sympy import *
x, t, C = symbols('x t C')
f, g = Function('f'), Function('g')
print(dsolve(f(x).diff(x) - f(x), f(x)), dsolve(f(x).diff(x, 2) + 9*f(x) - sin(x), f(x)))
print(dsolve(f(x).diff(x, 2) - 3*f(x).diff(x) + 2*f(x), f(x)))
print(diff(x**2*sin(x), x, 2), diff(exp(x*t), x, t), Derivative(x**3, x).doit())
print(idiff(x**2 + t**2 - 1, t, x))
print((x**2 + 1).subs(x, 3), (x*t).subs({x: 1, t: 2}), lambdify(x, x**2 + 1, 'math')(3))
print(lambdify((x, t), sin(x) + t, 'math')(1, 2), Function('h')(x).diff(x))
print(sympify('x**2 + 2*x'), expand((x + t + 1)**3).coeff(x, 2))
print((x**2 + 3*x).as_poly(x).coeffs(), Wild('w'), (x + t).free_symbols)
print((x*t + 1).atoms(Symbol), (x**2).is_polynomial(x), srepr(x), (x + 1).replace(x, t))
print((x**2 + x).as_coefficients_dict(), S(3)/7, Rational('0.125'), Float('1.5', 10))

from sympy import *
from sympy.geometry import *
A, B, C = Point(0, 0), Point(6, 0), Point(2, 5)
T = Triangle(A, B, C)
print(T.area, T.perimeter, T.circumcenter, T.incenter, T.centroid, T.orthocenter)
print(T.circumradius, T.inradius, T.angles[A], T.medians[A].length, T.altitudes[C])
print(Circle(A, 3).intersection(Line(Point(-4, 1), Point(4, 1))), Circle(A, B, C).radius)
print(Line(A, C).slope, Line(A, C).equation(), Segment(A, B).midpoint, Line(A, B).distance(C))
print(A.distance(C), Polygon(A, B, C, Point(-1, 3)).area)
print(Circle(A, 5).tangent_lines(Point(10, 0)), Ellipse(A, 3, 2).area)
print(Line(A, C).perpendicular_line(B), Line(A, B).intersection(Line(C, Point(3, -1))))
print(Point3D(1, 2, 3).distance(Point3D(0, 0, 0)))
print(Plane(Point3D(1, 1, 1), normal_vector=(1, 4, 7)).distance(Point3D(0, 0, 0)))
print(Line(A, C).angle_between(Line(A, B)), RegularPolygon(A, 2, 6).area)
print(convex_hull(A, B, C, Point(2, 1)).area, A.is_collinear(B, C), C.reflect(Line(A, B)))
print(C.rotate(pi/2))

from sympy import *
from sympy.logic import *
from sympy.combinatorics import *
from sympy.utilities.iterables import *
from sympy.stats import *
a, b, c = symbols('a b c')
print(simplify_logic((a & b) | (a & ~b)), satisfiable(a & ~b), to_cnf(a >> b))
print(And(a, b).subs({a: True, b: False}), Implies(a, b), Xor(a, b))
print(Permutation([1, 2, 0]).order(), Permutation(0, 1)(2, 3).cyclic_form)
print(SymmetricGroup(4).order(), DihedralGroup(4).order())
print(list(multiset_permutations([1, 1, 2]))[:2], list(partitions(4))[:2])
print(list(subsets([1, 2, 3], 2)), list(variations([1, 2], 2)))
X, Y = Die('X', 6), Die('Y', 6)
print(P(X + Y > 9), E(X), variance(X), P(X > 3), density(Coin('C')).dict, E(Normal('Z', 0, 1)))
print(P(Binomial('W', 5, Rational(1, 3)) > 3), E(Uniform('U', 0, 1)**2))

from sympy import *
x, y = symbols('x y')
print(latex(x**2/(y + 1) + sqrt(x)), pretty(x**2/3 + Rational(1, 2)), str(Integral(x, x)))
print(latex(Matrix([[1, 2], [3, x]])), srepr(x + 1), pretty(Sum(x, (x, 1, 3))))
pprint(x**2 + 1/x)
print(N(pi, 30), pi.evalf(10), E.evalf(), sqrt(2).n(5), (sqrt(5) + 1)/2, exp(1))
print(GoldenRatio.evalf(), oo, zoo, nan, I**2, root(27, 3), cbrt(8), real_root(-8, 3))
print(Rational(1, 3) + Rational(1, 6), Integer(7) // 2, Integer(7) % 3, divmod(Integer(17), 5))
print(log(8, 2), exp(log(3)), sinh(0), acos(0), erf(1).evalf(), LambertW(1).evalf())
print(simplify(log(9)/log(3)), (-8)**Rational(1, 3), sqrt(-4), 2**Rational(1, 2))
print(round(pi.evalf(), 3), int(floor(pi)), float(pi), complex(1 + 2*I))
from sympy.calculus.util import maximum, minimum, continuous_domain, function_range
from sympy.calculus import stationary_points, is_increasing
r = symbols('r', real=True)
print(maximum(-r**2 + 4*r, r), minimum(r**2 + 1, r, Interval(-1, 2)))
print(continuous_domain(1/r, r, S.Reals), stationary_points(r**3 - 3*r, r))
print(is_increasing(r**3, Interval(0, 1)), function_range(r**2, r, Interval(0, 2)))
from sympy.parsing.sympy_parser import implicit_multiplication_application, parse_expr
from sympy.parsing.sympy_parser import standard_transformations
print(parse_expr('2*x + sin(y)'))
rules = (*standard_transformations, implicit_multiplication_application)
print(parse_expr('2x', transformations=rules))

import mpmath
from mpmath import mp, mpf, quad, findroot, nsum, inf
mp.dps = 30
print(mpf(1)/3, mp.pi, mpmath.sqrt(2), quad(lambda v: v**2, [0, 1]))
print(findroot(lambda v: v**2 - 2, 1.5), nsum(lambda k: 1/k**2, [1, inf]), mpmath.zeta(3))
print(mpmath.gamma(0.5), mpmath.identify(0.5), mpmath.polyroots([1, 0, -2]))
print(mpmath.matrix([[1, 2], [3, 4]])**-1, mpmath.nstr(mp.e, 10), mpmath.mpc(1, 2)**2)
print(mpmath.factorial(10), mpmath.binomial(5, 2), mpmath.diff(mpmath.sin, 1))
print(mpmath.taylor(mpmath.exp, 0, 3))
mp.dps = 15
"""

SCIPY = r"""
import numpy as np
from scipy import optimize, integrate, linalg, stats, special
print(optimize.brentq(lambda t: t * t - 2, 0, 2), integrate.quad(np.sin, 0, 1)[0])
print(linalg.det(np.eye(3)), stats.norm.cdf(0.5), special.gamma(4.5))
print(optimize.minimize(lambda v: (v[0] - 1)**2 + v[1]**2, [0.0, 1.0]).x)
print(optimize.fsolve(lambda v: v**3 - 2, 1.0), optimize.linprog([1, 2], [[-1, -1]], [-3]).fun)
print(stats.binom.pmf(2, 5, 0.5), stats.t.ppf(0.975, 10))
print(stats.linregress([0, 1, 2], [1, 3, 5]).slope)
print(np.random.default_rng(0).normal(size=3), np.random.rand(2), special.comb(5, 2, exact=True))
"""
