//! The mathematics behind the Sinkhorn explorer, in f64.

use birkhoff::diagnose::Matrix;

/// The matrix after 0, 1, … `iterations` iterations in the log domain: columns, then rows (the order of
/// the model: rows are last). Entry 0 is exp(h) divided by its sum, to have something to look at.
pub fn trace(h: &[f64], n: usize, iterations: usize) -> Vec<Matrix> {
    let mut z = h.to_vec();
    let total = log_sum_exp(z.iter().copied());
    let matrix = |z: &[f64]| Matrix::new(n, z.iter().map(|v| v.exp()).collect());
    let mut all = vec![matrix(&z.iter().map(|v| v - total + (n as f64).ln()).collect::<Vec<_>>())];
    for _ in 0..iterations {
        for i in 0..n {
            let s = log_sum_exp((0..n).map(|o| z[o * n + i]));
            (0..n).for_each(|o| z[o * n + i] -= s);
        }
        for row in z.chunks_mut(n) {
            let s = log_sum_exp(row.iter().copied());
            row.iter_mut().for_each(|v| *v -= s);
        }
        all.push(matrix(&z));
    }
    all
}

fn log_sum_exp(v: impl Iterator<Item = f64> + Clone) -> f64 {
    let most = v.clone().fold(f64::NEG_INFINITY, f64::max);
    most + v.map(|x| (x - most).exp()).sum::<f64>().ln()
}

/// max_i |Σ_o M[o, i] − 1|.
pub fn column_error(m: &Matrix) -> f64 {
    m.col_sums().iter().fold(0.0, |a, s| f64::max(a, (s - 1.0).abs()))
}

/// How much of the differences between streams is left at most: the norm of M on vectors whose entries sum
/// to zero.
pub fn differences(m: &Matrix) -> f64 {
    let n = m.n();
    let mut centred = Matrix::identity(n);
    centred.add_scaled(&Matrix::new(n, vec![1.0; n * n]), -1.0 / n as f64);
    (m * &centred).singular_values().first().copied().unwrap_or(0.0)
}

/// What 1, 2, … matrices one after the other do.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Composed {
    /// Forward gain of M_l ⋯ M_1.
    pub forward: Vec<f64>,
    /// Its backward gain.
    pub backward: Vec<f64>,
    /// [`differences`] of it.
    pub differences: Vec<f64>,
}

/// Composes the matrices in order, the later on the left.
pub fn compose(layers: &[Matrix]) -> Composed {
    let mut out = Composed::default();
    let mut product: Option<Matrix> = None;
    for m in layers {
        let p = product.map_or_else(|| m.clone(), |p| m * &p);
        out.forward.push(p.forward_gain());
        out.backward.push(p.backward_gain());
        out.differences.push(differences(&p));
        product = Some(p);
    }
    out
}

/// Normally distributed numbers, the same for the same seed (Box and Muller over splitmix64).
pub fn normal(seed: u64, count: usize) -> Vec<f64> {
    let mut state = seed;
    let mut uniform = move || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    };
    (0..count)
        .map(|_| {
            let (u, v) = (1.0 - uniform(), uniform());
            (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()
        })
        .collect()
}

/// Logits to start from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Preset {
    /// How mHC starts: 0 on the diagonal, −6 beside it.
    Identity,
    /// Normal with standard deviation 2.
    Random,
    /// Streams change places.
    Permutation,
    /// ±80: what float32 must survive.
    Extreme,
}

impl Preset {
    /// All of them.
    pub const ALL: [Preset; 4] = [Preset::Identity, Preset::Random, Preset::Permutation, Preset::Extreme];

    /// On its button.
    pub fn title(self) -> &'static str {
        match self {
            Preset::Identity => "near identity",
            Preset::Random => "random",
            Preset::Permutation => "permutation",
            Preset::Extreme => "±80",
        }
    }

    /// The n² logits.
    pub fn logits(self, n: usize, seed: u64) -> Vec<f64> {
        let cells = (0..n * n).map(|k| (k / n, k % n));
        match self {
            Preset::Identity => cells.map(|(o, i)| if o == i { 0.0 } else { -6.0 }).collect(),
            Preset::Random => normal(seed, n * n).into_iter().map(|x| 2.0 * x).collect(),
            Preset::Permutation => cells.map(|(o, i)| if (o + 1) % n == i { 4.0 } else { -4.0 }).collect(),
            Preset::Extreme => {
                normal(seed, n * n).into_iter().map(|x| if x > 0.0 { 80.0 } else { -80.0 }).collect()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use birkhoff::graph::Graph;
    use birkhoff::graph::exec::{Device, Program, State};

    #[test]
    fn the_explorer_shows_what_the_model_computes() {
        for n in [2usize, 3, 4, 8] {
            for preset in Preset::ALL {
                let h = preset.logits(n, 3);
                let mut g = Graph::new();
                let x = g.constant([1, n, n], h.clone());
                let y = g.sinkhorn(x, 20);
                let mut state = State::new(&Device::Cpu);
                let mut p = Program::compile(&Device::Cpu, &state, &g, &[y], "test").expect("compiles");
                p.run(&mut state).expect("runs");
                let Program::Cpu(cpu, keep) = &p else { unreachable!() };
                let want = cpu.read(keep[0]);
                let got = trace(&h, n, 20).pop().expect("21 matrices");
                for (a, b) in got.data().iter().zip(want) {
                    assert!((a - f64::from(b)).abs() < 2e-6, "{preset:?} {n}: {a} {b}");
                }
            }
        }
    }

    #[test]
    fn doubly_stochastic_matrices_do_not_grow() {
        let m: Vec<Matrix> =
            (0..12).map(|s| trace(&Preset::Random.logits(4, s), 4, 60).pop().expect("matrix")).collect();
        let c = compose(&m);
        for l in 0..12 {
            assert!((c.forward[l] - 1.0).abs() < 1e-9 && (c.backward[l] - 1.0).abs() < 1e-3, "{c:?}");
            assert!(l == 0 || c.differences[l] <= c.differences[l - 1] + 1e-9);
        }
        // what each leaves of the differences bounds what is left in the end
        let bound: f64 = m.iter().map(differences).product();
        assert!(bound < 0.1 && c.differences[11] <= bound * 1.001, "{} of {bound}", c.differences[11]);
        let swap = trace(&Preset::Permutation.logits(3, 0), 3, 40).pop().expect("matrix");
        assert!(differences(&swap) > 0.99);
    }

    #[test]
    fn column_errors_fall() {
        let errors: Vec<f64> = trace(&Preset::Random.logits(5, 9), 5, 30).iter().map(column_error).collect();
        assert!(errors[1] > errors[5] && errors[5] > errors[20] && errors[30] < 1e-4, "{errors:?}");
        let all = normal(1, 20_000);
        let mean = all.iter().sum::<f64>() / 2e4;
        let var = all.iter().map(|x| x * x).sum::<f64>() / 2e4;
        assert!(mean.abs() < 0.03 && (var - 1.0).abs() < 0.05);
    }
}
