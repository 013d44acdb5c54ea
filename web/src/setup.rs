//! What a user of the page chooses.

use birkhoff::model::config::{Config, ConfigError};
use serde::{Deserialize, Serialize};

/// Where the model runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceWord {
    /// WebGPU on hardware, else the CPU.
    #[default]
    Auto,
    /// WebGPU, also where a software driver stands behind it; an error where there is none.
    WebGpu,
    /// The CPU executor.
    Cpu,
}

/// Where the rows come from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "from", rename_all = "lowercase")]
pub enum DataChoice {
    /// The planted click log of `birkhoff synth`, its rows drawn with `seed` for training and `seed + 1` for
    /// validation.
    Planted {
        /// Seed of the rows.
        seed: u64,
        /// Training rows.
        train: u64,
        /// Validation rows.
        valid: u64,
    },
    /// A file in Criteo's format; its last tenth is for validation.
    File {
        /// Its name.
        name: String,
        /// Its bytes, never sent anywhere.
        #[serde(skip)]
        bytes: std::rc::Rc<Vec<u8>>,
    },
}

impl DataChoice {
    /// Rows of the planted log, with some more to validate.
    pub fn planted(seed: u64, rows: u64) -> DataChoice {
        DataChoice::Planted { seed, train: rows, valid: rows.min(4_000) }
    }
}

/// A run to start.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Setup {
    /// `key=value` over the page's defaults, as `--set` of the command line.
    #[serde(default)]
    pub set: Vec<String>,
    /// Where the rows come from.
    pub data: DataChoice,
    /// Where it runs.
    #[serde(default)]
    pub device: DeviceWord,
    /// Steps after which the run ends, 0 = at the end of its last epoch.
    #[serde(default)]
    pub steps: u64,
}

/// What differs from the command line's defaults: a step short enough for a frame, and a curve with many points.
pub const PAGE_DEFAULTS: [&str; 5] = [
    "train.batch=128",
    "train.eval_batch=512",
    "train.log_every=5",
    "train.eval_every=100",
    "train.patience=0",
];

/// The configuration that the page begins with: the command line's, but for [`PAGE_DEFAULTS`].
pub fn page_defaults() -> Config {
    Config::from_text("page", "", &PAGE_DEFAULTS.map(str::to_string)).unwrap_or_default()
}

impl Setup {
    /// The configuration.
    pub fn config(&self) -> Result<Config, ConfigError> {
        let sets: Vec<String> =
            PAGE_DEFAULTS.iter().map(|s| s.to_string()).chain(self.set.iter().cloned()).collect();
        Config::from_text("page", "", &sets)
    }
}

/// Where a file of rows is cut into training and validation rows: after the line that reaches nine tenths.
pub fn split_at(bytes: &[u8]) -> usize {
    let at = bytes.len() / 10 * 9;
    let line = bytes[at..].iter().position(|&b| b == b'\n');
    line.map_or(bytes.len(), |n| at + n + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_s_defaults_are_a_configuration() {
        let data = DataChoice::Planted { seed: 1, train: 10, valid: 10 };
        let setup = Setup { set: vec!["model.layers=2".into()], data, device: DeviceWord::Cpu, steps: 0 };
        let config = setup.config().expect("valid");
        assert_eq!((config.model.layers, config.train.batch), (2, 128));
        let text = serde_json::to_string(&setup).expect("json");
        assert_eq!(serde_json::from_str::<Setup>(&text).expect("back"), setup);
        let (page, program) = (page_defaults(), Config::default());
        assert_eq!((page.train.batch, page.train.log_every), (128, 5));
        assert_eq!((page.train.lr, page.model), (program.train.lr, program.model));
        let bad = Setup { set: vec!["model.layer=2".into()], ..setup };
        assert!(bad.config().is_err());
    }

    #[test]
    fn a_file_is_cut_between_lines() {
        let text = "abc\n".repeat(100);
        let at = split_at(text.as_bytes());
        assert_eq!((at % 4, at), (0, 364));
        assert_eq!(split_at(b"one line"), 8);
    }
}
