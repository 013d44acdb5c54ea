//! The matrices of one diagnosis, and their file: `snapshots/step-000000120.safetensors` in a run folder.
//!
//! Tensors, all f32, for layer l of L, n streams, m slots:
//!
//! | name | shape | what |
//! |---|---|---|
//! | `layers.{l}.pre` | `[n]` | token average of pre |
//! | `layers.{l}.post` | `[n]` | token average of post |
//! | `layers.{l}.res` | `[n, n]` | token average of res, row = output stream |
//! | `layers.{l}.attention.{module}` | `[m, m]` | attention weights, row = query; mean over heads and batch |
//! | `composites` | `[L(L+1)/2, n, n]` | token average of M_b ⋯ M_a, pairs (a, b) with a ≤ b, a first; NaN across a layer that changes the slot count |
//!
//! Metadata: `birkhoff_snapshot` = 1, `step`, `rows`, `mode`, `streams`, `layers`.

use super::matrix::Matrix;
use safetensors::tensor::{Dtype, TensorView};
use safetensors::{SafeTensors, serialize};
use std::collections::HashMap;

/// Version of the layout above.
const VERSION: &str = "1";

/// The matrices of all layers at one step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Snapshot {
    /// Updates done.
    pub step: u64,
    /// Rows trained on.
    pub rows: u64,
    /// `shortcut`, `hc` or `mhc`.
    pub mode: String,
    /// n.
    pub streams: usize,
    /// Layer by layer.
    pub layers: Vec<LayerSnapshot>,
    /// Token-averaged composites of the pairs (a, b), a ≤ b: see [`Snapshot::composite`].
    pub composites: Vec<f32>,
}

/// The token averages of a layer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LayerSnapshot {
    /// `[n]`
    pub pre: Vec<f32>,
    /// `[n]`
    pub post: Vec<f32>,
    /// `[n, n]`, row = output stream.
    pub res: Vec<f32>,
    /// Attention maps of the modules that have one.
    pub modules: Vec<ModuleSnapshot>,
}

/// The attention map of a module.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ModuleSnapshot {
    /// Name of the module in its layer.
    pub name: String,
    /// Slots m.
    pub slots: usize,
    /// `[m, m]`, row = query slot; rows sum to 1.
    pub attention: Vec<f32>,
}

/// Position of the pair (a, b), a ≤ b < L, in the packed list.
pub fn pair_index(layers: usize, a: usize, b: usize) -> usize {
    debug_assert!(a <= b && b < layers);
    a * layers - a * a.saturating_sub(1) / 2 + (b - a)
}

impl Snapshot {
    /// The token-averaged M_b ⋯ M_a; `None` where the slot count changes in between.
    pub fn composite(&self, a: usize, b: usize) -> Option<Matrix> {
        let k = self.streams * self.streams;
        let at = pair_index(self.layers.len(), a, b) * k;
        let m = self.composites.get(at..at + k)?;
        m.iter().all(|x| !x.is_nan()).then(|| Matrix::from_f32(self.streams, m))
    }

    /// The token-averaged res of a layer.
    pub fn res(&self, layer: usize) -> Option<Matrix> {
        let l = self.layers.get(layer)?;
        (l.res.len() == self.streams * self.streams).then(|| Matrix::from_f32(self.streams, &l.res))
    }

    /// File name in the run's `snapshots` folder.
    pub fn file_name(step: u64) -> String {
        format!("step-{step:09}.safetensors")
    }

    /// The step in a file name.
    pub fn step_of(file_name: &str) -> Option<u64> {
        file_name.strip_prefix("step-")?.strip_suffix(".safetensors")?.parse().ok()
    }

    /// The file's bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        let n = self.streams;
        let mut named: Vec<(String, Vec<usize>, &[f32])> = vec![];
        for (l, s) in self.layers.iter().enumerate() {
            named.push((format!("layers.{l}.pre"), vec![s.pre.len()], &s.pre));
            named.push((format!("layers.{l}.post"), vec![s.post.len()], &s.post));
            named.push((format!("layers.{l}.res"), vec![n, n], &s.res));
            for m in &s.modules {
                let name = format!("layers.{l}.attention.{}", m.name);
                named.push((name, vec![m.slots, m.slots], &m.attention));
            }
        }
        let pairs = self.composites.len() / (n * n).max(1);
        named.push(("composites".into(), vec![pairs, n, n], &self.composites));
        let bytes: Vec<Vec<u8>> =
            named.iter().map(|t| t.2.iter().flat_map(|x| x.to_le_bytes()).collect()).collect();
        let views = named.iter().zip(&bytes).map(|((name, shape, _), b)| {
            let v = TensorView::new(Dtype::F32, shape.clone(), b).expect("sizes match their data");
            (name.clone(), v)
        });
        let about = HashMap::from([
            ("birkhoff_snapshot".to_string(), VERSION.to_string()),
            ("step".into(), self.step.to_string()),
            ("rows".into(), self.rows.to_string()),
            ("mode".into(), self.mode.clone()),
            ("streams".into(), n.to_string()),
            ("layers".into(), self.layers.len().to_string()),
        ]);
        serialize(views, Some(about)).expect("a small file of plain tensors")
    }

    /// Reads a file's bytes. The error is one line without the file's name.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, String> {
        let (_, head) = SafeTensors::read_metadata(bytes).map_err(|e| format!("no safetensors file: {e}"))?;
        let about = head.metadata().clone().unwrap_or_default();
        match about.get("birkhoff_snapshot").map(String::as_str) {
            Some(VERSION) => {}
            Some(v) => return Err(format!("snapshot format {v}, this program reads {VERSION}")),
            None => return Err("not a snapshot of a birkhoff run".into()),
        }
        let number = |key: &str| {
            let v = about.get(key).and_then(|v| v.parse::<u64>().ok());
            v.ok_or_else(|| format!("its metadata lack the number `{key}`"))
        };
        let (layers, n) = (number("layers")? as usize, number("streams")? as usize);
        if layers > 4096 || n > 64 {
            return Err(format!("{layers} layers of {n} streams: not a plausible snapshot"));
        }
        let file = SafeTensors::deserialize(bytes).map_err(|e| format!("no safetensors file: {e}"))?;
        let read = |name: &str, len: usize| -> Result<Vec<f32>, String> {
            let t = file.tensor(name).map_err(|_| format!("tensor `{name}` is missing"))?;
            if t.dtype() != Dtype::F32 || t.shape().iter().product::<usize>() != len {
                return Err(format!("tensor `{name}` is {:?} {:?}, not {len} floats", t.dtype(), t.shape()));
            }
            Ok(t.data().chunks_exact(4).map(|c| f32::from_le_bytes([c[0], c[1], c[2], c[3]])).collect())
        };
        let mut s = Snapshot {
            step: number("step")?,
            rows: number("rows")?,
            mode: about.get("mode").cloned().unwrap_or_default(),
            streams: n,
            layers: vec![],
            composites: read("composites", layers * (layers + 1) / 2 * n * n)?,
        };
        let mut names: Vec<&str> = file.names().into_iter().collect();
        names.sort_unstable();
        for l in 0..layers {
            let prefix = format!("layers.{l}.attention.");
            let mut modules = vec![];
            for name in names.iter().filter(|n| n.starts_with(&prefix)) {
                let slots = file.tensor(name).ok().and_then(|t| t.shape().first().copied()).unwrap_or(0);
                let attention = read(name, slots * slots)?;
                modules.push(ModuleSnapshot { name: name[prefix.len()..].into(), slots, attention });
            }
            s.layers.push(LayerSnapshot {
                pre: read(&format!("layers.{l}.pre"), n)?,
                post: read(&format!("layers.{l}.post"), n)?,
                res: read(&format!("layers.{l}.res"), n * n)?,
                modules,
            });
        }
        Ok(s)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Snapshot {
        let layer = |x: f32| LayerSnapshot {
            pre: vec![x, 0.5],
            post: vec![1.0, x],
            res: vec![x, 0.1, 0.2, 0.9],
            modules: vec![ModuleSnapshot {
                name: "attention".into(),
                slots: 3,
                attention: (0..9).map(|i| i as f32).collect(),
            }],
        };
        let mut composites: Vec<f32> = (0..6 * 4).map(|i| i as f32).collect();
        composites[4..8].fill(f32::NAN);
        Snapshot {
            step: 120,
            rows: 61440,
            mode: "mhc".into(),
            streams: 2,
            layers: vec![layer(0.1), layer(0.2), layer(0.3)],
            composites,
        }
    }

    #[test]
    fn a_snapshot_survives_its_file() {
        let s = sample();
        let r = Snapshot::from_bytes(&s.to_bytes()).unwrap();
        assert_eq!(r.layers, s.layers);
        assert_eq!((r.step, r.rows, r.mode.as_str()), (120, 61440, "mhc"));
        assert_eq!(r.composite(0, 1), None, "NaN marks a segment's end");
        assert_eq!(r.composite(1, 2).unwrap().data(), [16.0, 17.0, 18.0, 19.0]);
        assert_eq!(r.composite(2, 2).unwrap().data(), [20.0, 21.0, 22.0, 23.0]);
        assert_eq!(Snapshot::step_of(&Snapshot::file_name(120)), Some(120));
    }

    #[test]
    fn damaged_files_are_explained() {
        let bytes = sample().to_bytes();
        for cut in [0, 7, 8, 100, bytes.len() / 2, bytes.len() - 1] {
            assert!(Snapshot::from_bytes(&bytes[..cut]).is_err(), "{cut}");
        }
        let text = String::from_utf8_lossy(&bytes[8..400]).into_owned();
        let at = text.find("birkhoff_snapshot").expect("in the header") + 8;
        let mut other = bytes.clone();
        other[at] = b'X';
        assert!(Snapshot::from_bytes(&other).unwrap_err().contains("not a snapshot"));
    }
}
