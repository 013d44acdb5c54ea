//! The residual modes of a stack (math.md section 4): `hc` and `mhc` keep n streams a token, `S[B, m, n, d]`.
//!
//! A layer is `x'_o = Σ_i res[o, i] x_i + post[o]·F(Σ_i pre[i] x_i)`, with F = Ensemble(LN(·)); row index o of
//! `res` is the output stream. The coefficients are functions of the token (HC eq. 5; mHC eqs. 7-9, 14-18).

use super::config::{Coefficient, Collapse, LayerPlan, ResidualConfig, ResidualMode};
use super::layer::ensemble;
use super::params::{Builder, Init, Kind};
use crate::graph::{Shape, Tensor};
use crate::ops::access::Access;
use crate::ops::expr::{Bin, Expr, Un};
use crate::ops::matmul::Trans;

/// ε of the RMSNorms inside the coefficients.
pub const RMS_EPS: f64 = 1e-6;

/// The mixing coefficients of one layer; `None` where an ablation fixes them.
#[derive(Clone, Copy, Debug)]
pub struct Coefficients {
    /// `[T, n]`
    pub pre: Option<Tensor>,
    /// `[T', n]`, on the output tokens.
    pub post: Option<Tensor>,
    /// `[T, n, n]`
    pub res: Option<Tensor>,
}

/// Copies `X[B, m, d]` into n streams: `[B, m, n, d]`.
pub fn expand(b: &mut Builder<'_>, x: Tensor, n: usize) -> Tensor {
    let (bt, m, d) = (x.dim(0), x.dim(1), x.dim(2));
    let a = Access::new(vec![bt * m, n, d], vec![d, 0, 1], 0);
    b.g.map_access(&Expr::input(0), &[(x, a)], Shape::new(&[bt, m, n, d]))
}

/// Mean or sum of the streams: `[B, m, n, d]` → `[B, m, d]`.
pub fn collapse(b: &mut Builder<'_>, s: Tensor, how: Collapse) -> Tensor {
    let (bt, m, n, d) = (s.dim(0), s.dim(1), s.dim(2), s.dim(3));
    let y = b.g.reduce_sum(s, bt * m, n, d, [bt, m, d]);
    match how {
        Collapse::Sum => y,
        Collapse::Mean => b.g.affine(y, 1.0 / n as f64, 0.0),
    }
}

/// One layer on the streams. Returns the new state `[B, l, n, d]`, the coefficients, the contributions.
pub fn stream_layer(
    b: &mut Builder<'_>,
    plan: &LayerPlan,
    cfg: &ResidualConfig,
    s: Tensor,
) -> (Tensor, Coefficients, Vec<Tensor>) {
    let (bt, m, n, d) = (s.dim(0), s.dim(1), s.dim(2), s.dim(3));
    let t = bt * m;
    let st = s.reshaped([t, n, d]);
    let weights = Weights::new(b, cfg, plan.index, n, d);

    // with a change of slots, the streams are mixed to l tokens first and post is computed from those
    let l = plan.slots_out;
    let mix =
        plan.shortcut_weight.then(|| b.scoped("shortcut", |b| b.weight("w", &[m, l], Init::glorot(m, l))));
    let mixed = mix.map(|w| b.g.slot_mix(s.reshaped([bt, m, n * d]), w).reshaped([bt * l, n, d]));

    let on_input = weights.coefficients(b, cfg, st);
    let post = match mixed {
        None => on_input.post,
        Some(x) => weights.coefficients(b, cfg, x).post,
    };
    let u = match on_input.pre {
        Some(pre) => b.g.stream_aggregate(st, pre),
        None => {
            let y = b.g.reduce_sum(st, t, n, d, [t, d]);
            b.g.affine(y, 1.0 / n as f64, 0.0)
        }
    };
    let u = b.layer_norm("ln", u.reshaped([bt, m, d]));
    let (f, parts) = ensemble(b, plan, u);
    let f = f.reshaped([bt * l, d]);

    let out = match (on_input.res, post, mix) {
        (Some(res), Some(post), None) => b.g.stream_merge(st, f, res, post),
        (res, post, mix) => {
            let carried = match res {
                Some(res) => b.g.matmul(res, st),
                None => st,
            };
            let carried = match mix {
                Some(w) => b.g.slot_mix(carried.reshaped([bt, m, n * d]), w).reshaped([bt * l, n, d]),
                None => carried,
            };
            let f = f.reshaped([bt * l, 1, d]);
            match post {
                Some(p) => {
                    let pf = b.g.mul(p.reshaped([bt * l, n, 1]), f);
                    b.g.add(carried, pf)
                }
                None => b.g.add(carried, f),
            }
        }
    };
    (out.reshaped([bt, l, n, d]), Coefficients { pre: on_input.pre, post, res: on_input.res }, parts)
}

/// The parameters behind a layer's coefficients.
enum Weights {
    Hc { alpha: [Tensor; 3], theta: [Tensor; 3], bias: [Tensor; 3] },
    Mhc { phi: Tensor, alpha: [Tensor; 3], bias: [Tensor; 3] },
}

impl Weights {
    fn new(b: &mut Builder<'_>, cfg: &ResidualConfig, layer: usize, n: usize, d: usize) -> Self {
        match cfg.mode {
            ResidualMode::Hc => b.scoped("hc", |b| {
                let one_hot = (0..n).map(|i| if i == layer % n { 1.0 } else { 0.0 }).collect();
                let eye = (0..n * n).map(|k| if k / n == k % n { 1.0 } else { 0.0 }).collect();
                let seg = ["pre", "post", "res"];
                let alpha = seg.map(|s| {
                    b.param(&format!("alpha_{s}"), &[1], Init::Const(cfg.alpha_init), Kind::NoDecay)
                });
                let theta = [
                    b.weight("theta_pre", &[d], Init::Zero),
                    b.weight("theta_post", &[d], Init::Zero),
                    b.weight("theta_res", &[n, d], Init::Zero),
                ];
                let bias = [
                    b.param("b_pre", &[n], Init::Values(one_hot), Kind::NoDecay),
                    b.param("b_post", &[n], Init::Const(1.0), Kind::NoDecay),
                    b.param("b_res", &[n, n], Init::Values(eye), Kind::NoDecay),
                ];
                Weights::Hc { alpha, theta, bias }
            }),
            _ => b.scoped("mhc", |b| {
                let k = 2 * n + n * n;
                let phi = b.weight("phi", &[n * d, k], Init::Normal(0.02));
                let alpha = b.param("alpha", &[3], Init::Const(cfg.alpha_init), Kind::NoDecay);
                // pre = 1/n, post = 1, res near the identity
                let b_pre = if n == 1 { 20.0 } else { -((n - 1) as f64).ln() };
                let mut init = vec![b_pre as f32; n];
                init.extend(vec![0.0; n]);
                init.extend(
                    (0..n * n).map(|k| if k / n == k % n { 0.0 } else { cfg.res_off_diagonal as f32 }),
                );
                let bias = b.param("b", &[k], Init::Values(init), Kind::NoDecay);
                let alpha = [0, 1, 2].map(|i| b.g.slice(alpha, 0, i, 1));
                let bias =
                    [b.g.slice(bias, 0, 0, n), b.g.slice(bias, 0, n, n), b.g.slice(bias, 0, 2 * n, n * n)];
                Weights::Mhc { phi, alpha, bias }
            }),
        }
    }

    /// pre `[T, n]`, post `[T, n]`, res `[T, n, n]` of the tokens `x[T, n, d]`.
    fn coefficients(&self, b: &mut Builder<'_>, cfg: &ResidualConfig, x: Tensor) -> Coefficients {
        let (t, n, d) = (x.dim(0), x.dim(1), x.dim(2));
        let learns = |c| cfg.learns(c);
        match self {
            Weights::Hc { alpha, theta, bias } => {
                // no weight in HC's RMSNorm; α tanh(θ·x̃_i) + b
                let xn = b.g.rms_norm(x, None, RMS_EPS);
                let mut one = |k: usize, rows: usize| {
                    let th = theta[k].reshaped([rows, d]);
                    let raw = b.g.matmul_t(th, xn, Trans { a: false, b: true }); // [T, rows, n]
                    let y = b.g.unary(Un::Tanh, raw.reshaped([t, rows * n]));
                    let y = b.g.mul(y, alpha[k]);
                    b.g.add(y, bias[k].reshaped([rows * n]))
                };
                Coefficients {
                    pre: learns(Coefficient::Pre).then(|| one(0, 1)),
                    post: learns(Coefficient::Post).then(|| one(1, 1)),
                    res: learns(Coefficient::Res).then(|| one(2, n).reshaped([t, n, n])),
                }
            }
            Weights::Mhc { phi, alpha, bias } => {
                let (raw_pre, raw_post, raw_res, ms) = b.g.mhc_project(x, *phi);
                let mut gate = |raw: Tensor, k: usize, tail: &dyn Fn(&mut Expr, u16) -> u16| {
                    // α · raw / √(ms + ε) + b, then the tail
                    let mut e = Expr::input(0);
                    let (ms_, a, c) = (e.arg(1), e.arg(2), e.arg(3));
                    let eps = e.num(RMS_EPS);
                    let r = e.bin(Bin::Add, ms_, eps);
                    let r = e.un(Un::Rsqrt, r);
                    let h = e.bin(Bin::Mul, 0, r);
                    let h = e.bin(Bin::Mul, h, a);
                    let h = e.bin(Bin::Add, h, c);
                    let y = tail(&mut e, h);
                    b.g.map(e.finish(y), &[raw, ms, alpha[k], bias[k]])
                };
                let pre = learns(Coefficient::Pre).then(|| gate(raw_pre, 0, &|e, h| e.un(Un::Sigmoid, h)));
                let post = learns(Coefficient::Post).then(|| {
                    gate(raw_post, 1, &|e, h| {
                        let s = e.un(Un::Sigmoid, h);
                        let two = e.num(2.0);
                        e.bin(Bin::Mul, s, two)
                    })
                });
                let h = learns(Coefficient::Res).then(|| gate(raw_res, 2, &|_, h| h));
                let res = h.map(|h| b.g.sinkhorn(h.reshaped([t, n, n]), cfg.sinkhorn_iterations));
                Coefficients { pre, post, res }
            }
        }
    }
}
