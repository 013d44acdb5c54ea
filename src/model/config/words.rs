//! The words of a configuration: every enum that is spelt by a word in TOML.

use std::fmt;

use serde::Serialize;

use super::{ConfigError, read, tree};

/// An enum whose variants are spelt by one word each in TOML.
pub(crate) trait Named: Copy + 'static {
    /// The words, in the order of the variants.
    const NAMES: &'static [&'static str];
    /// The variant of a word.
    fn from_name(name: &str) -> Option<Self>;
}

macro_rules! named {
    ($(#[$doc:meta])* $name:ident { $($(#[$vdoc:meta])* $variant:ident = $word:literal,)+ }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum $name { $($(#[$vdoc])* $variant,)+ }

        impl $name {
            /// The word of this variant in a configuration file.
            pub fn name(self) -> &'static str {
                match self { $(Self::$variant => $word,)+ }
            }
        }

        impl Named for $name {
            const NAMES: &'static [&'static str] = &[$($word),+];
            fn from_name(name: &str) -> Option<Self> {
                match name { $($word => Some(Self::$variant),)+ _ => None }
            }
        }

        impl read::FromNode for $name {
            fn from_node(node: &tree::Node, path: &str) -> Result<Self, ConfigError> {
                read::named(node, path)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.name())
            }
        }

        impl Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
                s.serialize_str(self.name())
            }
        }
    };
}

named! {
    /// How the outputs of a layer's modules become one tensor (math.md section 3).
    Ensemble {
        /// Σ U_i; all modules output the same number of slots.
        Sum = "sum",
        /// The slots of the modules one after the other.
        Concat = "concat",
        /// Σ α_i U_i with learned α, initialised to 1/k; all modules output the same slots.
        Weighted = "weighted",
    }
}
named! {
    /// The normalisation of a layer.
    Norm {
        /// LayerNorm over the embedding axis, ε = 1e-5.
        Layer = "layer",
    }
}
named! {
    /// The residual mode of the whole stack (math.md section 4).
    ResidualMode {
        /// DHEN's post-norm shortcut: Y = LN(Ensemble(X) + Shortcut(X)).
        Shortcut = "shortcut",
        /// Hyper-connections (arXiv 2409.19606).
        Hc = "hc",
        /// Manifold-constrained hyper-connections (arXiv 2512.24880).
        Mhc = "mhc",
    }
}
named! {
    /// One of the three coefficient groups of a hyper-connection.
    Coefficient {
        /// Read weights of the streams, `[n]`.
        Pre = "pre",
        /// Write weights of the streams, `[n]`.
        Post = "post",
        /// Mixing matrix of the streams, `[n, n]`, row = output stream.
        Res = "res",
    }
}
named! {
    /// How the n streams become one after the last layer.
    Collapse {
        /// Their mean.
        Mean = "mean",
        /// Their sum.
        Sum = "sum",
    }
}
named! {
    /// The recurrence of a cross module (math.md section 2.3).
    CrossForm {
        /// DCN-V2 with full matrices `[m·d, m·d]`.
        Full = "full",
        /// DCN-V2 with U, V `[m·d, rank]`.
        LowRank = "low-rank",
        /// DCN-V1 with one vector `[m·d]` a layer.
        Vector = "vector",
    }
}
named! {
    /// The kinds of interaction module, without their options.
    Kind {
        /// Transformer encoder layer over the slots.
        Attention = "attention",
        /// One slot mix.
        Linear = "linear",
        /// Cross network (DCN).
        Cross = "cross",
        /// Gram matrix of the slots.
        Gram = "gram",
        /// Pairwise inner products with an MLP (DLRM).
        Dlrm = "dlrm",
        /// 2-D convolution over slots and width.
        Conv = "conv",
        /// Factorisation machine.
        Fm = "fm",
        /// MLP over the flattened input.
        Mlp = "mlp",
    }
}
named! {
    /// The format of the data files.
    Format {
        /// Told from the content of each file.
        Auto = "auto",
        /// Criteo TSV: label, 13 integers, 26 categories.
        Criteo = "criteo",
        /// Comma-separated, or by `data.delimiter`.
        Csv = "csv",
        /// Tab-separated.
        Tsv = "tsv",
        /// `label index:value …`.
        Libsvm = "libsvm",
        /// `label field:index:value …`.
        Libffm = "libffm",
        /// Apache Parquet.
        Parquet = "parquet",
        /// Arrow IPC.
        Arrow = "arrow",
    }
}
named! {
    /// Whether files have a header.
    Header {
        /// Told from the first row.
        Auto = "auto",
        /// They have.
        Yes = "yes",
        /// They have none.
        No = "no",
    }
}
named! {
    /// What a column of the data is.
    ColumnKind {
        /// What is to be predicted.
        Label = "label",
        /// How much a row counts.
        Weight = "weight",
        /// A number.
        Numeric = "numeric",
        /// One value of many: an embedding.
        Categorical = "categorical",
        /// Several values: embeddings, pooled.
        List = "list",
        /// Whom a row belongs to, for grouped metrics.
        Group = "group",
        /// Nothing that is used.
        Ignore = "ignore",
    }
}
named! {
    /// How the embeddings of a list become one.
    Pooling {
        /// Their mean.
        Mean = "mean",
        /// Their sum.
        Sum = "sum",
    }
}
named! {
    /// How a categorical value becomes an id.
    Encoding {
        /// Ids from the training file.
        Vocabulary = "vocabulary",
        /// A stable 64-bit hash modulo `buckets`.
        Hash = "hash",
    }
}
named! {
    /// The transform of numeric columns (math.md section 1).
    Numeric {
        /// ln(1 + max(v, 0)).
        Log = "log",
        /// (v − mean) / std of the training file.
        Standardize = "standardize",
        /// As it is.
        None = "none",
    }
}
named! {
    /// The optimiser of the embedding rows.
    EmbeddingOptimizer {
        /// Row-wise Adagrad: one accumulator a row.
        Adagrad = "adagrad",
        /// Lazy Adam: moments of the touched rows only.
        Adam = "adam",
    }
}
named! {
    /// The learning rate over the run, after the warm-up (math.md section 8).
    Schedule {
        /// The same throughout.
        Constant = "constant",
        /// Half a cosine down to `schedule_floor` at the end of the run.
        Cosine = "cosine",
        /// A straight line down to `schedule_floor` at the end of the run.
        Linear = "linear",
        /// ×`step_factor` at each of `step_at` of the run.
        Step = "step",
        /// ×`plateau_factor` after evaluations without a better one.
        Plateau = "plateau",
    }
}
named! {
    /// The figure of an evaluation that chooses the best weights.
    Monitor {
        /// Normalized entropy, the lower the better; the log loss where it is undefined.
        Ne = "ne",
        /// AUC, the higher the better; the log loss where it is undefined.
        Auc = "auc",
        /// Log loss, the lower the better.
        Logloss = "logloss",
    }
}
