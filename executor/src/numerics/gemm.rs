//! Matrix products: every output is one dot product in the one order, whatever is computed beside it.

use super::lanes::{LANES, Lanes, Stored};

/// Tokens that pass over a panel of weight rows before the next panel is read: their inputs stay in the
/// second-level cache.
const TOKEN_BLOCK: usize = 64;

/// Operands of `out[m, n] = x[m, k] * weight[n, k]^T + bias[n]`.
pub(crate) struct Gemm<'a, W> {
    pub(crate) x: &'a [f32],
    pub(crate) weight: &'a [W],
    pub(crate) bias: Option<&'a [f32]>,
    pub(crate) m: usize,
    pub(crate) n: usize,
    pub(crate) k: usize,
    pub(crate) out: &'a mut [f32],
}

super::kernel! {
    /// The product.
    gemm<W: Stored>(args: Gemm<'_, W>) = lanes gemm
}

#[inline(always)]
unsafe fn gemm<V: Lanes, W: Stored, const MR: usize, const NR: usize>(args: Gemm<'_, W>) {
    let Gemm {
        x,
        weight,
        bias,
        m,
        n,
        k,
        out,
    } = args;
    assert!(x.len() >= m * k, "{} inputs for {m} x {k}", x.len());
    assert!(weight.len() >= n * k, "{} weights for {n} x {k}", weight.len());
    assert!(out.len() >= m * n, "{} outputs for {m} x {n}", out.len());
    assert!(bias.is_none_or(|bias| bias.len() >= n), "a bias shorter than {n}");
    let mut block = 0;
    while block < m {
        let block_end = (block + TOKEN_BLOCK).min(m);
        let mut row = 0;
        while row < n {
            let rows = if row + NR <= n { NR } else { 1 };
            let mut token = block;
            while token < block_end {
                let tokens = (block_end - token).min(MR);
                let panel = Panel {
                    x,
                    weight,
                    k,
                    n,
                    token,
                    row,
                    bias,
                };
                // SAFETY: the caller's features; token + tokens <= m and row + rows <= n, so every row
                // lies inside the slices, whose lengths were checked above.
                unsafe {
                    match (tokens, rows == NR) {
                        (1, true) => panel.compute::<V, 1, NR>(out),
                        (2, true) => panel.compute::<V, 2, NR>(out),
                        (3, true) => panel.compute::<V, 3, NR>(out),
                        (1, false) => panel.compute::<V, 1, 1>(out),
                        (2, false) => panel.compute::<V, 2, 1>(out),
                        (3, false) => panel.compute::<V, 3, 1>(out),
                        (_, true) => panel.compute::<V, MR, NR>(out),
                        (_, false) => panel.compute::<V, MR, 1>(out),
                    }
                }
                token += tokens;
            }
            row += rows;
        }
        block = block_end;
    }
}

/// Some tokens by some weight rows.
struct Panel<'a, W> {
    x: &'a [f32],
    weight: &'a [W],
    k: usize,
    n: usize,
    token: usize,
    row: usize,
    bias: Option<&'a [f32]>,
}

impl<W: Stored> Panel<'_, W> {
    /// # Safety
    /// `M` tokens from `token` and `N` rows from `row` lie inside the slices; features as [`Lanes`].
    #[inline(always)]
    unsafe fn compute<V: Lanes, const M: usize, const N: usize>(&self, out: &mut [f32]) {
        // SAFETY: the caller's promise keeps every pointer inside its slice for `k` elements.
        let sums = unsafe {
            let mut x = [self.x.as_ptr(); M];
            for (i, x) in x.iter_mut().enumerate() {
                *x = x.add((self.token + i) * self.k);
            }
            let mut weight = [self.weight.as_ptr(); N];
            for (j, weight) in weight.iter_mut().enumerate() {
                *weight = weight.add((self.row + j) * self.k);
            }
            dots::<V, W, M, N>(x, weight, self.k)
        };
        for (i, sums) in sums.iter().enumerate() {
            let out = &mut out[(self.token + i) * self.n + self.row..][..N];
            for (j, (out, sum)) in out.iter_mut().zip(sums).enumerate() {
                *out = match self.bias {
                    Some(bias) => sum + bias[self.row + j],
                    None => *sum,
                };
            }
        }
    }
}

/// `M x N` dot products of `k` elements each: the register tile that everything is made of.
///
/// # Safety
/// Every pointer is valid for `k` elements; features as [`Lanes`].
#[inline(always)]
pub(super) unsafe fn dots<V: Lanes, W: Stored, const M: usize, const N: usize>(
    x: [*const f32; M],
    weight: [*const W; N],
    k: usize,
) -> [[f32; N]; M] {
    // SAFETY: positions stay below `k`: whole groups of lanes first, then a tail that reads `k - at`.
    unsafe {
        let mut sums = [[V::zero(); N]; M];
        let mut at = 0;
        while at + LANES <= k {
            let mut weights = [V::zero(); N];
            for j in 0..N {
                weights[j] = W::load(weight[j].add(at));
            }
            for i in 0..M {
                let inputs = V::load(x[i].add(at));
                for j in 0..N {
                    sums[i][j] = inputs.mul_add(weights[j], sums[i][j]);
                }
            }
            at += LANES;
        }
        if at < k {
            let mut weights = [V::zero(); N];
            for j in 0..N {
                weights[j] = W::load_first(weight[j].add(at), k - at);
            }
            for i in 0..M {
                let inputs: V = f32::load_first(x[i].add(at), k - at);
                for j in 0..N {
                    sums[i][j] = inputs.mul_add(weights[j], sums[i][j]);
                }
            }
        }
        let mut out = [[0.0; N]; M];
        for i in 0..M {
            out[i] = sum_each(sums[i]);
        }
        out
    }
}

/// The sum of every element over its lanes.
///
/// # Safety
/// Features as [`Lanes`].
#[inline(always)]
unsafe fn sum_each<V: Lanes, const N: usize>(row: [V; N]) -> [f32; N] {
    let mut sums = [0.0; N];
    // SAFETY: the caller's promise.
    unsafe {
        if N == 4 {
            sums.copy_from_slice(&V::sum4([row[0], row[1 % N], row[2 % N], row[3 % N]]));
        } else {
            for j in 0..N {
                sums[j] = row[j].sum();
            }
        }
    }
    sums
}
