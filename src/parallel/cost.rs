//! What a placement of embedding tables costs: predicted seconds a step on each rank.
//!
//! Every rank has a batch of B examples. For each table it sends the ids of its batch, each once, to the ranks that
//! hold them, receives their rows, and sends their gradients back; a row's holder adds up the gradients of all ranks
//! and updates it. Of a shard with c columns let D be the distinct rows that one rank's batch names in it, and G those
//! that all W batches name together ([`super::traffic`]). Values and ids have 4 bytes. Then
//!
//! - **lookup**: `shard_overhead + bytes/memory_bandwidth`, where bytes =
//!   `4·(2·W·D·c` (rows read, and written to what is sent) `+ W·D·c` (gradients read) `+ 2·G·c` (their sums, written and
//!   read) `+ 2·G·(c·(1 + v) + a))` (rows and the optimiser's v scalars a value and a scalars a row, read and written);
//! - **communication**: three exchanges of all with all: ids, rows, gradients. Per rank one takes
//!   `latency·(W − 1) + max(sent, received)·t`, sent and received in bytes, what stays on the rank left out. A holder
//!   receives `(W − 1)·4·D` bytes of ids a shard, sends `(W − 1)·4·D·c` of rows, receives as many of gradients; one who
//!   asks sends `4·D` bytes of ids for each shard that it does not hold, receives `4·D·c` of rows, sends as many of
//!   gradients. `t` is seconds a byte, between hosts and within one in the proportion of the rank's peers there.
//!
//! A step waits for its slowest rank. Dense layers cost the same on all ranks, and are left out.

use serde::{Deserialize, Serialize};
use std::ops::{Add, AddAssign, Sub};

use super::placement::{Lines, MAX_WORLD, Placement, Shard, Table};
use super::traffic::Traffic;

/// The machines: what a rank has, and what is between ranks. As TOML, all keys optional:
///
/// ```toml
/// ranks = 8
/// ranks_per_host = 4           # default: all on one host
/// memory = "16GiB"             # of a rank, for embedding tables and their optimiser state; default: no bound
/// memory_bandwidth = "10GB/s"  # of a rank, reading rows in no order
/// host_bandwidth = "2GB/s"     # of a rank, to others of its host, each way
/// network_bandwidth = "1.25GB/s"  # of a rank, to other hosts, each way: 10 Gbit/s
/// latency = 50e-6              # seconds a message
/// shard_overhead = 20e-6       # seconds a shard a step: launches, and what else does not depend on its size
/// ```
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Cluster {
    /// Number of ranks.
    pub ranks: usize,
    /// Ranks of a host; rank r is on host r / ranks_per_host.
    pub ranks_per_host: usize,
    /// Bytes of a rank for embedding tables and their optimiser state.
    pub memory: Option<u64>,
    /// Bytes/s of a rank's memory.
    pub memory_bandwidth: f64,
    /// Bytes/s of a rank to others of its host, each way.
    pub host_bandwidth: f64,
    /// Bytes/s of a rank to other hosts, each way.
    pub network_bandwidth: f64,
    /// Seconds a message.
    pub latency: f64,
    /// Seconds a shard and step, whatever its size.
    pub shard_overhead: f64,
}

/// What is wrong with a cluster file or a size, in one line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ClusterError {
    /// Not TOML of this form.
    #[error("{place}: not a cluster: {message}")]
    Toml {
        /// `file:line`.
        place: String,
        /// The parser's words.
        message: String,
    },
    /// A value out of range.
    #[error("{place}: {key} = {found}, expected {expected}")]
    Value {
        /// File.
        place: String,
        /// Key.
        key: &'static str,
        /// As given.
        found: String,
        /// What would do.
        expected: &'static str,
    },
}

/// Bytes as people write them: a whole number, or a number with a unit.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Bytes(f64);

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged, expecting = "expected bytes, such as 17179869184 or \"16GiB\"")]
        enum Raw {
            Whole(u64),
            Number(f64),
            Text(String),
        }
        match Raw::deserialize(d)? {
            Raw::Whole(n) => Ok(Bytes(n as f64)),
            Raw::Number(x) => Ok(Bytes(x)),
            Raw::Text(t) => {
                bytes(t.strip_suffix("/s").unwrap_or(&t)).map(Bytes).map_err(serde::de::Error::custom)
            }
        }
    }
}

/// Bytes of a text such as `16GiB`, `1.5 GB` or `1048576`.
fn bytes(text: &str) -> Result<f64, String> {
    let fail = || {
        format!(
            "{:?} is no size, expected a number with B, kB, KiB, MB, MiB, GB, GiB, TB or TiB, such as 16GiB",
            text
        )
    };
    let text = text.trim();
    let digits = text.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(text.len());
    let number: f64 = text[..digits].parse().map_err(|_| fail())?;
    let unit = match text[digits..].trim_start().to_ascii_lowercase().as_str() {
        "" | "b" => 1.0,
        "kb" => 1e3,
        "mb" => 1e6,
        "gb" => 1e9,
        "tb" => 1e12,
        "kib" => f64::powi(2.0, 10),
        "mib" => f64::powi(2.0, 20),
        "gib" => f64::powi(2.0, 30),
        "tib" => f64::powi(2.0, 40),
        _ => return Err(fail()),
    };
    Ok(number * unit)
}

/// Memory as people write it, such as `16GiB`: at least one byte, less than an exabyte.
pub fn memory(text: &str) -> Result<u64, String> {
    match bytes(text)? {
        b if (1.0..1e18).contains(&b) => Ok(b as u64),
        _ => Err(format!("{text:?} is out of range, expected at least one byte and less than 10^18")),
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawCluster {
    ranks: Option<usize>,
    ranks_per_host: Option<usize>,
    memory: Option<Bytes>,
    memory_bandwidth: Option<Bytes>,
    host_bandwidth: Option<Bytes>,
    network_bandwidth: Option<Bytes>,
    latency: Option<f64>,
    shard_overhead: Option<f64>,
}

impl Cluster {
    /// So many ranks on one host, the rest as the file's defaults.
    pub fn new(ranks: usize) -> Cluster {
        Cluster {
            ranks,
            ranks_per_host: ranks.max(1),
            memory: None,
            memory_bandwidth: 10e9,
            host_bandwidth: 2e9,
            network_bandwidth: 1.25e9,
            latency: 50e-6,
            shard_overhead: 20e-6,
        }
    }

    /// Reads a file; `name` stands for it in errors. `ranks` counts more than the file's.
    pub fn from_toml(name: &str, text: &str, ranks: Option<usize>) -> Result<Cluster, ClusterError> {
        let raw: RawCluster = toml::from_str(text).map_err(|e| {
            let place = Lines::new(name, text).place(e.span().map_or(0, |s| s.start));
            ClusterError::Toml { place, message: e.message().replace('\n', "; ") }
        })?;
        let fail = |key, found: String, expected| {
            Err(ClusterError::Value { place: name.to_owned(), key, found, expected })
        };
        let Some(ranks) = ranks.or(raw.ranks) else {
            return fail("ranks", "nothing".into(), "a number of ranks (or --world)");
        };
        let mut c = Cluster::new(ranks);
        c.ranks_per_host = raw.ranks_per_host.unwrap_or(c.ranks_per_host);
        for (key, n) in [("ranks", c.ranks), ("ranks_per_host", c.ranks_per_host)] {
            if !(1..=MAX_WORLD).contains(&n) {
                return fail(key, n.to_string(), "1 to 65536");
            }
        }
        for (key, value, to) in [
            ("memory_bandwidth", raw.memory_bandwidth, &mut c.memory_bandwidth),
            ("host_bandwidth", raw.host_bandwidth, &mut c.host_bandwidth),
            ("network_bandwidth", raw.network_bandwidth, &mut c.network_bandwidth),
        ] {
            *to = value.map_or(*to, |b| b.0);
            if !(1.0..1e18).contains(to) {
                return fail(key, to.to_string(), "bytes a second, above 1 and below 10^18");
            }
        }
        for (key, value, to) in [
            ("latency", raw.latency, &mut c.latency),
            ("shard_overhead", raw.shard_overhead, &mut c.shard_overhead),
        ] {
            *to = value.unwrap_or(*to);
            if !(0.0..=10.0).contains(to) {
                return fail(key, to.to_string(), "seconds, 0 to 10");
            }
        }
        if let Some(Bytes(b)) = raw.memory {
            if !(1.0..1e18).contains(&b) {
                return fail("memory", b.to_string(), "bytes, at least 1 and below 10^18");
            }
            c.memory = Some(b as u64);
        }
        Ok(c)
    }

    /// The host of a rank.
    pub fn host_of(&self, rank: usize) -> usize {
        rank / self.ranks_per_host
    }

    /// Seconds a byte between a rank and its peers, if it has as much for each.
    fn seconds_a_byte(&self, rank: usize) -> f64 {
        if self.ranks < 2 {
            return 0.0;
        }
        let first = self.host_of(rank) * self.ranks_per_host;
        let near = (self.ranks - first).min(self.ranks_per_host) - 1;
        let far = self.ranks - 1 - near;
        (near as f64 / self.host_bandwidth + far as f64 / self.network_bandwidth) / (self.ranks - 1) as f64
    }
}

/// What shards ask of the rank that holds them, each step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Load {
    /// Bytes of memory, optimiser state included.
    pub bytes: u64,
    /// Seconds of lookup and update.
    pub lookup: f64,
    /// Bytes of ids that one rank's batch has for them.
    pub ids: f64,
    /// Bytes of rows that it gets for those.
    pub rows: f64,
}

impl Add for Load {
    type Output = Load;
    fn add(self, o: Load) -> Load {
        Load {
            bytes: self.bytes + o.bytes,
            lookup: self.lookup + o.lookup,
            ids: self.ids + o.ids,
            rows: self.rows + o.rows,
        }
    }
}

impl Sub for Load {
    type Output = Load;
    fn sub(self, o: Load) -> Load {
        Load {
            bytes: self.bytes - o.bytes,
            lookup: self.lookup - o.lookup,
            ids: self.ids - o.ids,
            rows: self.rows - o.rows,
        }
    }
}

impl AddAssign for Load {
    fn add_assign(&mut self, o: Load) {
        *self = *self + o;
    }
}

/// What a rank's part of a placement costs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RankCost {
    /// The rank.
    pub rank: usize,
    /// Its host.
    pub host: usize,
    /// Shards that it holds.
    pub shards: usize,
    /// Bytes of them, with optimiser state.
    pub bytes: u64,
    /// Predicted seconds a step of lookup and update.
    pub lookup_s: f64,
    /// Predicted seconds a step of communication.
    pub communication_s: f64,
}

impl RankCost {
    /// Both together.
    pub fn seconds(&self) -> f64 {
        self.lookup_s + self.communication_s
    }
}

/// What a placement costs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Evaluation {
    /// Rank by rank.
    pub ranks: Vec<RankCost>,
    /// Seconds a step of the slowest rank.
    pub max_s: f64,
    /// Seconds a step of the mean rank.
    pub mean_s: f64,
    /// The first over the second; 1 is even.
    pub imbalance: f64,
}

/// The cost of placements of given tables on a given cluster.
#[derive(Clone, Debug)]
pub struct CostModel<'a> {
    /// The tables.
    pub tables: &'a [Table],
    /// The cluster.
    pub cluster: &'a Cluster,
    traffic: Vec<Traffic>,
    seconds_a_byte: Vec<f64>,
}

impl<'a> CostModel<'a> {
    /// For batches of `batch` examples on each rank.
    pub fn new(tables: &'a [Table], cluster: &'a Cluster, batch: u64) -> Self {
        CostModel {
            tables,
            cluster,
            traffic: tables.iter().map(|t| Traffic::new(t, batch, cluster.ranks)).collect(),
            seconds_a_byte: (0..cluster.ranks).map(|r| cluster.seconds_a_byte(r)).collect(),
        }
    }

    /// Which rows of a table are named.
    pub fn traffic(&self, table: usize) -> &Traffic {
        &self.traffic[table]
    }

    /// What a shard asks of the rank that holds it.
    pub fn load(&self, shard: &Shard) -> Load {
        let t = &self.tables[shard.table];
        let (one, all) =
            (self.traffic[shard.table].one(&shard.rows), self.traffic[shard.table].all(&shard.rows));
        let (c, world) = (f64::from(shard.width()), self.cluster.ranks as f64);
        let (v, a) = (f64::from(t.value_state), f64::from(t.row_state));
        let moved = 3.0 * world * one * c + 2.0 * all * c + 2.0 * all * (c * (1.0 + v) + a);
        Load {
            bytes: shard.bytes(self.tables),
            lookup: self.cluster.shard_overhead + 4.0 * moved / self.cluster.memory_bandwidth,
            ids: 4.0 * one,
            rows: 4.0 * one * c,
        }
    }

    /// Seconds that a load adds to a rank, what the rank then need not ask others for left aside: additive, what LPT
    /// goes by.
    pub fn work(&self, load: &Load, rank: usize) -> f64 {
        let peers = (self.cluster.ranks - 1) as f64;
        load.lookup + self.seconds_a_byte[rank] * peers * (load.ids + 2.0 * load.rows)
    }

    /// Seconds of communication a step of a rank that holds `held` of `total`.
    pub fn communication(&self, rank: usize, held: &Load, total: &Load) -> f64 {
        let peers = (self.cluster.ranks - 1) as f64;
        let slower = |held: f64, total: f64| (peers * held).max(total - held);
        let bytes = slower(held.ids, total.ids) + 2.0 * slower(held.rows, total.rows);
        3.0 * peers * self.cluster.latency + self.seconds_a_byte[rank] * bytes
    }

    /// Seconds a step of a rank that holds `held` of `total`.
    pub fn seconds(&self, rank: usize, held: &Load, total: &Load) -> f64 {
        held.lookup + self.communication(rank, held, total)
    }

    /// What a placement costs; it must be one of these tables and ranks.
    pub fn evaluate(&self, placement: &Placement) -> Evaluation {
        let mut held = vec![(0, Load::default()); self.cluster.ranks];
        let mut total = Load::default();
        for s in placement.shards() {
            let load = self.load(s);
            total += load;
            held[s.rank].0 += 1;
            held[s.rank].1 += load;
        }
        let ranks: Vec<RankCost> = held
            .iter()
            .enumerate()
            .map(|(rank, (shards, load))| RankCost {
                rank,
                host: self.cluster.host_of(rank),
                shards: *shards,
                bytes: load.bytes,
                lookup_s: load.lookup,
                communication_s: self.communication(rank, load, &total),
            })
            .collect();
        let max_s = ranks.iter().map(RankCost::seconds).fold(0.0, f64::max);
        let mean_s = ranks.iter().map(RankCost::seconds).sum::<f64>() / ranks.len() as f64;
        let imbalance = if mean_s > 0.0 { max_s / mean_s } else { 1.0 };
        Evaluation { ranks, max_s, mean_s, imbalance }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(rows: u64, width: u32) -> Table {
        Table {
            name: format!("t{rows}"),
            rows,
            width,
            lookups: 1.0,
            unique: 1.0,
            ranked: false,
            row_state: 1,
            value_state: 0,
        }
    }

    #[test]
    fn costs_follow_the_formulas() {
        // so large that all ids are distinct: D = 100, G = 300
        let tables = [table(1 << 40, 16), table(1 << 41, 4)];
        let cluster = Cluster {
            memory_bandwidth: 1e6,
            host_bandwidth: 2e6,
            network_bandwidth: 5e5,
            latency: 1e-3,
            shard_overhead: 0.5,
            ranks_per_host: 2,
            ..Cluster::new(3)
        };
        let model = CostModel::new(&tables, &cluster, 100);
        let half =
            |first: u32, rank| Shard { columns: first..first + 8, ..Shard::whole(0, &tables[0], rank) };
        let p = Placement::new(3, vec![half(0, 0), half(8, 2), Shard::whole(1, &tables[1], 2)], &tables);
        let e = model.evaluate(&p.expect("a placement"));
        let close =
            |got: f64, expected: f64| assert!((got - expected).abs() < 1e-6 * expected, "{got} {expected}");
        // rank 0: D·c = 800, G·c = 2400; read and sent, gradients, sums, rows and accumulator
        let moved = 2 * 3 * 800 + 3 * 800 + 2 * 2400 + 2 * (2400 + 300);
        close(e.ranks[0].lookup_s, 0.5 + 4.0 * f64::from(moved) / 1e6);
        assert_eq!((e.ranks[1].lookup_s, e.ranks[1].shards, e.ranks[1].bytes), (0.0, 0, 0));
        assert_eq!(e.ranks[2].bytes, 4 * ((9 << 40) + (5 << 41)));
        assert_eq!(e.ranks.iter().map(|r| r.host).collect::<Vec<_>>(), [0, 0, 1]);
        // ids of three shards: 300; rows: 800 + 800 + 400 values
        let near_far = 0.5 / 2e6 + 0.5 / 5e5;
        let exchange =
            |seconds: f64, bytes: [u32; 3]| 6e-3 + seconds * 4.0 * f64::from(bytes.iter().sum::<u32>());
        // rank 0 holds 100 ids and 800 values: as many received of two peers as it asks for
        close(e.ranks[0].communication_s, exchange(near_far, [200, 1600, 1600]));
        close(e.ranks[1].communication_s, exchange(near_far, [300, 2000, 2000]));
        close(e.ranks[2].communication_s, exchange(1.0 / 5e5, [400, 2400, 2400]));
        close(e.max_s, e.ranks[2].seconds());
        close(e.imbalance * e.mean_s, e.max_s);
        // one rank has nobody to talk to
        let alone = Cluster::new(1);
        let model = CostModel::new(&tables, &alone, 100);
        let shards = vec![Shard::whole(0, &tables[0], 0), Shard::whole(1, &tables[1], 0)];
        let e = model.evaluate(&Placement::new(1, shards, &tables).expect("a placement"));
        assert_eq!((e.ranks[0].communication_s, e.imbalance), (0.0, 1.0));
    }

    #[test]
    fn sizes_are_read_as_people_write_them() {
        for (text, n) in [
            ("16GiB", 16 << 30),
            ("1.5 GB", 1_500_000_000),
            ("1048576", 1 << 20),
            (" 3 kib ", 3072),
            ("0.5TiB", 1 << 39),
        ] {
            assert_eq!(memory(text), Ok(n), "{text}");
        }
        for text in ["", "GiB", "16G", "-1GiB", "1e3", "1.2.3MB", "16 GiB of", "0", "999999999TiB"] {
            assert!(memory(text).is_err(), "{text}");
        }
    }

    #[test]
    fn cluster_files_are_checked() {
        let text = "ranks = 8\nranks_per_host = 4\nmemory = \"16GiB\"\nnetwork_bandwidth = \"10 GB/s\"\nhost_bandwidth = 3e9\nlatency = 1e-5\n";
        let c = Cluster::from_toml("c.toml", text, None).expect("a cluster");
        assert_eq!((c.ranks, c.ranks_per_host, c.memory), (8, 4, Some(16 << 30)));
        assert_eq!((c.network_bandwidth, c.host_bandwidth, c.latency), (1e10, 3e9, 1e-5));
        assert_eq!(c.memory_bandwidth, Cluster::new(1).memory_bandwidth);
        assert_eq!(Cluster::from_toml("c.toml", text, Some(3)).expect("a cluster").ranks, 3);
        for (text, message) in [
            ("", "c.toml: ranks = nothing, expected a number of ranks (or --world)"),
            ("ranks = 0", "c.toml: ranks = 0, expected 1 to 65536"),
            ("ranks = 2\nmemory = 0", "c.toml: memory = 0, expected bytes, at least 1 and below 10^18"),
            ("ranks = 2\nlatency = -1.0", "c.toml: latency = -1, expected seconds, 0 to 10"),
            ("ranks = 2\nlatency = nan", "c.toml: latency = NaN, expected seconds, 0 to 10"),
            (
                "ranks = 2\n\nmemory = \"16G\"",
                "c.toml:3: not a cluster: \"16G\" is no size, expected a number with B, kB, KiB, MB, MiB, GB, GiB, TB or TiB, such as 16GiB",
            ),
            (
                "ranks = 2\nmemory = true",
                "c.toml:2: not a cluster: expected bytes, such as 17179869184 or \"16GiB\"",
            ),
        ] {
            assert_eq!(Cluster::from_toml("c.toml", text, None).expect_err(text).to_string(), message);
        }
        let e = Cluster::from_toml("c.toml", "rank = 2", None).expect_err("unknown").to_string();
        assert!(e.starts_with("c.toml:1: not a cluster: unknown field `rank`"), "{e}");
    }
}
