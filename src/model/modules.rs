//! The interaction modules (math.md section 2): `X[B, m, d]` → `U[B, l, d]`.

use super::config::{CrossForm, ModuleKind};
use super::params::{AttentionProbe, Builder, Init, Kind};
use crate::graph::Tensor;
use crate::ops::matmul::Trans;

/// Builds one module with `l` output slots.
pub fn module(b: &mut Builder<'_>, kind: &ModuleKind, x: Tensor, l: usize) -> Tensor {
    match kind {
        ModuleKind::Linear => slot_mix(b, "w", x, l),
        ModuleKind::Attention { heads, ffn } => attention(b, x, l, *heads, *ffn),
        ModuleKind::Cross { form, rank, depth } => cross(b, x, l, *form, *rank, *depth),
        ModuleKind::Gram => gram(b, x, l),
        ModuleKind::Dlrm { compressed, hidden } => dlrm(b, x, l, *compressed, hidden),
        ModuleKind::Conv { channels, kernel } => conv(b, x, l, *channels, *kernel),
        ModuleKind::Fm => fm(b, x, l),
        ModuleKind::Mlp { hidden } => {
            let v = flatten(b, x);
            let v = b.scoped("mlp", |b| b.mlp(v, hidden, true));
            unflatten(b, v, l, x.dim(2))
        }
    }
}

/// `U[b, j, c] = Σ_i W[i, j] X[b, i, c]` with a new parameter W`[m, l]`.
pub fn slot_mix(b: &mut Builder<'_>, name: &str, x: Tensor, l: usize) -> Tensor {
    let m = x.dim(1);
    let w = b.weight(name, &[m, l], Init::glorot(m, l));
    b.g.slot_mix(x, w)
}

fn flatten(b: &mut Builder<'_>, x: Tensor) -> Tensor {
    b.g.reshape(x, [x.dim(0), x.dim(1) * x.dim(2)])
}

/// `reshape(v Wm)`, Wm`[h, l·d]`: the way back from a vector to slots.
fn unflatten(b: &mut Builder<'_>, v: Tensor, l: usize, d: usize) -> Tensor {
    let h = v.dim(1);
    let wm = b.weight("wm", &[h, l * d], Init::glorot(h, l * d));
    let u = b.g.matmul(v, wm);
    b.g.reshape(u, [v.dim(0), l, d])
}

/// A standard post-norm Transformer encoder layer over the slots, then a slot mix (eq. 4).
fn attention(b: &mut Builder<'_>, x: Tensor, l: usize, heads: usize, ffn: usize) -> Tensor {
    let d = x.dim(2);
    let ffn = if ffn == 0 { 2 * d } else { ffn };
    let project = |b: &mut Builder<'_>, x: Tensor, w: &str, bias: &str, to: usize, init: Init| {
        let from = x.shape().last();
        let w = b.weight(w, &[from, to], init);
        let bias = b.bias(bias, &[to]);
        let y = b.g.matmul(x, w);
        b.g.add(y, bias)
    };
    let q = project(b, x, "wq", "bq", d, Init::glorot(d, d));
    let k = project(b, x, "wk", "bk", d, Init::glorot(d, d));
    let v = project(b, x, "wv", "bv", d, Init::glorot(d, d));
    let scope = b.scope();
    b.attentions.push(AttentionProbe { scope, q, k, heads });
    let o = b.g.attention(q, k, v, heads);
    let o = project(b, o, "wo", "bo", d, Init::glorot(d, d));
    let z = b.g.add(x, o);
    let z = b.layer_norm("ln1", z);
    let h = project(b, z, "w1", "b1", ffn, Init::he(d));
    let h = b.g.relu(h);
    let h = project(b, h, "w2", "b2", d, Init::glorot(ffn, d));
    let y = b.g.add(z, h);
    let y = b.layer_norm("ln2", y);
    slot_mix(b, "w", y, l)
}

/// A cross network (DCN, DCN-V2) over the flattened slots; the skip inside the recurrence stays.
fn cross(b: &mut Builder<'_>, x: Tensor, l: usize, form: CrossForm, rank: usize, depth: usize) -> Tensor {
    let x0 = flatten(b, x);
    let n = x0.dim(1);
    let mut xt = x0;
    for t in 0..depth {
        let bias = b.bias(&format!("b.{t}"), &[n]);
        xt = match form {
            CrossForm::Full => {
                // stored [out, in]: math.md writes W_t x_t
                let w = b.weight(&format!("w.{t}"), &[n, n], Init::glorot(n, n));
                let y = b.g.matmul_t(xt, w, Trans { a: false, b: true });
                cross_step(b, x0, y, bias, xt)
            }
            CrossForm::LowRank => {
                let u = b.weight(&format!("u.{t}"), &[n, rank], Init::glorot(n, rank));
                let v = b.weight(&format!("v.{t}"), &[n, rank], Init::glorot(n, rank));
                let p = b.g.matmul(xt, v);
                let y = b.g.matmul_t(p, u, Trans { a: false, b: true });
                cross_step(b, x0, y, bias, xt)
            }
            CrossForm::Vector => {
                let w = b.weight(&format!("w.{t}"), &[n], Init::glorot(n, 1));
                let s = b.g.matmul(xt, w.reshaped([n, 1]));
                let p = b.g.mul(x0, s);
                let p = b.g.add(p, bias);
                b.g.add(p, xt)
            }
        };
    }
    unflatten(b, xt, l, x.dim(2))
}

/// `x0 ⊙ (y + bias) + xt`
fn cross_step(b: &mut Builder<'_>, x0: Tensor, y: Tensor, bias: Tensor, xt: Tensor) -> Tensor {
    let y = b.g.add(y, bias);
    let y = b.g.mul(x0, y);
    b.g.add(y, xt)
}

/// Eq. 7: `U = Gᵀ·Wg + bg`, `G = X Xᵀ` per example, then a slot mix when l ≠ m.
fn gram(b: &mut Builder<'_>, x: Tensor, l: usize) -> Tensor {
    let (m, d) = (x.dim(1), x.dim(2));
    let wg = b.weight("wg", &[m, d], Init::Normal(1.0 / (m * d) as f64));
    let bg = b.bias("bg", &[m, d]);
    let gram = b.g.matmul_t(x, x, Trans { a: false, b: true });
    // G is symmetric: Gᵀ = G
    let u = b.g.matmul(gram, wg);
    let u = b.g.add(u, bg);
    if l == m { u } else { slot_mix(b, "w", u, l) }
}

/// AdvancedDLRM (eq. 3): all pairwise inner products and `c` compressed slots through an MLP.
fn dlrm(b: &mut Builder<'_>, x: Tensor, l: usize, c: usize, hidden: &[usize]) -> Tensor {
    let d = x.dim(2);
    let p = b.g.pairwise(x);
    let s = slot_mix(b, "wc", x, c);
    let s = flatten(b, s);
    let v = b.g.concat(&[p, s], 1);
    let v = b.scoped("mlp", |b| b.mlp(v, hidden, true));
    unflatten(b, v, l, d)
}

/// Eq. 5: the example as a one-channel image; slots and channels are mixed.
fn conv(b: &mut Builder<'_>, x: Tensor, l: usize, channels: usize, kernel: [usize; 2]) -> Tensor {
    let (n, m, d) = (x.dim(0), x.dim(1), x.dim(2));
    let [km, kd] = kernel;
    let k = b.weight("k", &[channels, km, kd], Init::he(km * kd));
    let bias = b.bias("b", &[channels]);
    let y = b.g.conv2d(x, k);
    let y = b.g.add(y, bias.reshaped([channels, 1]));
    let y = b.g.relu(y);
    let y = b.g.reshape(y, [n, m * channels, d]);
    slot_mix(b, "w", y, l)
}

/// Factorisation machine: `U[b, j, :] = s Wj`, s = ½[(Σx)² − Σx²].
fn fm(b: &mut Builder<'_>, x: Tensor, l: usize) -> Tensor {
    let d = x.dim(2);
    let w = b.param("w", &[l, d, d], Init::glorot(d, d), Kind::Dense);
    let s = b.g.fm(x);
    let u = b.g.matmul(s, w); // shared left operand: [l, B, d]
    b.g.permute(u, &[1, 0, 2])
}
