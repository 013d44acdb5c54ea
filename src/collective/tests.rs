//! Every operation over every transport, against sequential sums.

use super::*;
use half::{bf16, f16};
use proptest::prelude::*;
use std::time::Duration;

/// Runs `f` on every rank of a group of threads.
fn local<R: Send>(world: usize, f: impl Fn(Communicator) -> R + Sync) -> Vec<R> {
    on(Communicator::local(world, Duration::from_secs(20)), f)
}

pub(super) fn on<R: Send>(group: Vec<Communicator>, f: impl Fn(Communicator) -> R + Sync) -> Vec<R> {
    std::thread::scope(|s| {
        let f = &f;
        let ranks: Vec<_> = group
            .into_iter()
            .map(|c| {
                s.spawn(move || {
                    let r = f(c.clone());
                    c.finish().expect("all got here");
                    r
                })
            })
            .collect();
        ranks.into_iter().map(|r| r.join().expect("no panic")).collect()
    })
}

pub(super) const WORLDS: [usize; 5] = [1, 2, 3, 4, 7];

fn value(rank: usize, i: usize) -> f32 {
    ((i * 31 + rank * 17 + 5) % 1009) as f32 / 64.0 - 7.0
}

pub(super) fn vector(rank: usize, n: usize) -> Vec<f32> {
    (0..n).map(|i| value(rank, i)).collect()
}

fn exact(world: usize, n: usize) -> Vec<f64> {
    (0..n).map(|i| (0..world).map(|r| f64::from(value(r, i))).sum()).collect()
}

fn bits(v: &[f32]) -> Vec<u32> {
    v.iter().map(|x| x.to_bits()).collect()
}

/// All the operations, with `n` elements where sizes are free.
pub(super) fn all_operations(c: &Communicator, n: usize) {
    let (rank, world) = (c.rank(), c.world());
    let sum = exact(world, n);
    for wire in Wire::ALL {
        let mut v = vector(rank, n);
        c.all_reduce_wire(&mut v, wire, None).unwrap();
        let bound = match wire {
            Wire::F32 => 1e-4,
            Wire::Bf16 => 0.05 * world as f64 + 0.1,
            Wire::F16 => 0.02 * world as f64,
            Wire::Int8 => 0.12 * world as f64,
        };
        for (a, b) in v.iter().zip(&sum) {
            assert!((f64::from(*a) - b).abs() <= bound, "{wire} {world} {n}: {a} {b}");
        }
        // the same bits everywhere, and again
        let all = c.all_gather(&bits(&v), &vec![n; world]).unwrap();
        assert!(n == 0 || all.chunks(n).all(|x| x == bits(&v)), "{wire} {world} {n}");
        let again = c.all_reduce_wire_start(vector(rank, n), wire, vec![]).wait().unwrap().0;
        assert_eq!(bits(&again), bits(&v));
    }
    let mut v: Vec<u64> = (0..n as u64).map(|i| i << 33 | rank as u64).collect();
    c.all_reduce(&mut v, Reduction::Max).unwrap();
    assert!(v.iter().enumerate().all(|(i, v)| *v == (i as u64) << 33 | (world as u64 - 1)));
    let mut v: Vec<u32> = (0..n as u32).map(|i| i + rank as u32).collect();
    c.all_reduce(&mut v, Reduction::Sum).unwrap();
    let ranks = (world * (world - 1) / 2) as u32;
    assert!(v.iter().enumerate().all(|(i, v)| *v == i as u32 * world as u32 + ranks));
    let mut v: Vec<bf16> = (0..n).map(|i| bf16::from_f32((i % 8) as f32)).collect();
    c.all_reduce(&mut v, Reduction::Sum).unwrap();
    assert!(v.iter().enumerate().all(|(i, v)| v.to_f32() == ((i % 8) * world) as f32));
    let mut v: Vec<f16> = (0..n).map(|i| f16::from_f32((i % 8) as f32 + rank as f32)).collect();
    c.all_reduce(&mut v, Reduction::Min).unwrap();
    assert!(v.iter().enumerate().all(|(i, v)| v.to_f32() == (i % 8) as f32));

    // uneven: rank r has (n + r) / 2 elements, some have none
    let counts: Vec<usize> = (0..world).map(|r| if r == 1 { 0 } else { (n + r) / 2 }).collect();
    let total: usize = counts.iter().sum();
    let whole: Vec<f32> = (0..world).flat_map(|r| vector(r, counts[r])).collect();
    assert_eq!(c.all_gather(&vector(rank, counts[rank]), &counts).unwrap(), whole);
    let rounded = c.all_gather_wire(&vector(rank, counts[rank]), &counts, Wire::Bf16).unwrap();
    let all = c.all_gather(&bits(&rounded), &vec![total; world]).unwrap();
    assert!(total == 0 || all.chunks(total).all(|x| x == bits(&rounded)));
    let begin: usize = counts[..rank].iter().sum();
    for wire in [Wire::F32, Wire::Bf16] {
        let part = c.reduce_scatter(vector(rank, total), &counts, wire).unwrap();
        let sum = exact(world, total);
        assert_eq!(part.len(), counts[rank]);
        let bound = if wire.is_exact() { 1e-4 } else { 0.03 * world as f64 };
        for (a, b) in part.iter().zip(&sum[begin..]) {
            assert!((f64::from(*a) - b).abs() <= bound, "{a} {b}");
        }
    }
    // rank r sends (n + 3 r + 5 s) % (n + 1) elements to rank s
    let size = |r: usize, s: usize| (n + 3 * r + 5 * s) % (n + 1);
    let sent: Vec<usize> = (0..world).map(|s| size(rank, s)).collect();
    let received: Vec<usize> = (0..world).map(|r| size(r, rank)).collect();
    let data: Vec<f32> = (0..world).flat_map(|s| vector(100 * rank + s, sent[s])).collect();
    let expected: Vec<f32> = (0..world).flat_map(|r| vector(100 * r + rank, received[r])).collect();
    assert_eq!(c.all_to_all(&data, &sent, &received).unwrap(), expected);
    let near = c.all_to_all_wire(&data, &sent, &received, Wire::F16).unwrap();
    assert!(near.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 0.01));
    // the same in parts, s % 3 of them to rank s
    let length = |r: usize, s: usize, part: usize| (n + 3 * r + 5 * s + 7 * part) % 13;
    let mine: Vec<(usize, usize)> = (0..world).flat_map(|s| (0..s % 3).map(move |p| (s, p))).collect();
    let lengths = mine.iter().map(|(s, p)| length(rank, *s, *p) as u32).collect();
    let data = mine.iter().flat_map(|(s, p)| vector(100 * rank + 10 * s + p, length(rank, *s, *p))).collect();
    let parts = (0..world).map(|s| s % 3).collect();
    let (got, theirs) = c.all_to_all_parts_start(data, lengths, parts, rank % 3).wait().unwrap();
    let all = || (0..world).flat_map(|r| (0..rank % 3).map(move |p| (r, p)));
    assert!(theirs.into_iter().map(|n| n as usize).eq(all().map(|(r, p)| length(r, rank, p))));
    assert!(got.into_iter().eq(all().flat_map(|(r, p)| vector(100 * r + 10 * rank + p, length(r, rank, p)))));
    for root in 0..world {
        let mut v: Vec<u8> = (0..n).map(|i| (i * 7 + rank) as u8).collect();
        c.broadcast(&mut v, root).unwrap();
        assert!(v.iter().enumerate().all(|(i, v)| *v == (i * 7 + root) as u8));
    }
    if world > 1 {
        // round a ring, the even ones first
        let (right, left) = ((rank + 1) % world, (rank + world - 1) % world);
        let mut got = vec![0f32; n];
        if rank % 2 == 0 && rank != world - 1 {
            c.send(&vector(rank, n), right).unwrap();
            c.receive(&mut got, left).unwrap();
        } else {
            c.receive(&mut got, left).unwrap();
            c.send(&vector(rank, n), right).unwrap();
        }
        assert_eq!(got, vector(left, n));
    }
    c.barrier().unwrap();
}

#[test]
fn every_operation_with_threads() {
    for world in WORLDS {
        for n in [0, 1, 1237, 70_001] {
            local(world, |c| all_operations(&c, n));
        }
    }
}

#[test]
fn large_sums_with_threads() {
    for world in [2, 3, 4] {
        local(world, |c| all_operations(&c, 4 << 20));
    }
}

/// A hundred operations at once, of sizes that take different algorithms.
pub(super) fn in_flight(c: &Communicator) {
    let sizes = |i: usize| [3, 1000, 20_000, 100_000][i % 4];
    let started: Vec<_> =
        (0..100).map(|i| c.all_reduce_start(vector(c.rank() + i, sizes(i)), Reduction::Sum)).collect();
    let mut now = vec![1f32];
    c.all_reduce(&mut now, Reduction::Sum).unwrap();
    assert_eq!(now[0] as usize, c.world());
    for (i, h) in started.into_iter().enumerate() {
        let v = h.wait().unwrap();
        let at = sizes(i) / 2;
        let expected: f32 = (0..c.world()).map(|r| value(r + i, at)).sum();
        assert!((v[at] - expected).abs() < 1e-4);
    }
}

#[test]
fn a_hundred_in_flight_with_threads() {
    local(4, |c| in_flight(&c));
}

/// Groups within a group, used at the same time.
pub(super) fn splits(c: &Communicator) {
    let (rank, world) = (c.rank(), c.world());
    let half = c.split(Some((rank % 2) as u32), (world - rank) as u32).unwrap().unwrap();
    // ordered by key: the highest rank first
    let order = half.all_gather(&[rank as u32], &vec![1; half.world()]).unwrap();
    assert!(order.windows(2).all(|w| w[0] > w[1]) && order.iter().all(|r| *r as usize % 2 == rank % 2));
    let whole = c.all_reduce_start(vec![1f32; 300_000], Reduction::Sum);
    let part = half.all_reduce_start(vec![1f32; 300_000], Reduction::Sum);
    assert_eq!(part.wait().unwrap()[7] as usize, half.world());
    assert_eq!(whole.wait().unwrap()[7] as usize, world);
    let only = c.split((rank == 0).then_some(9), 0).unwrap();
    assert_eq!(only.is_some(), rank == 0);
    if let Some(o) = only {
        assert_eq!((o.rank(), o.world()), (0, 1));
    }
}

#[test]
fn splits_with_threads() {
    for world in [1, 2, 5] {
        local(world, |c| splits(&c));
    }
}

/// With error feedback the mean of many rounded sums comes near the sum.
#[test]
fn error_feedback() {
    for wire in [Wire::Int8, Wire::Bf16] {
        let means = local(3, |c| {
            let n = 1000;
            let mut lost = vec![0.0; n];
            let mut mean = vec![0f64; n];
            for _ in 0..64 {
                let mut v = vector(c.rank(), n);
                c.all_reduce_wire(&mut v, wire, Some(&mut lost)).unwrap();
                mean.iter_mut().zip(&v).for_each(|(m, v)| *m += f64::from(*v) / 64.0);
            }
            mean
        });
        let sum = exact(3, 1000);
        let worst =
            means.iter().flat_map(|m| m.iter().zip(&sum)).fold(0f64, |w, (a, b)| w.max((a - b).abs()));
        // without feedback 0.1 and more
        assert!(worst < 0.012, "{wire}: {worst}");
    }
}

#[test]
fn a_lost_rank_is_known_everywhere() {
    let mut group = Communicator::local(3, Duration::from_secs(30));
    let gone = group.pop().unwrap();
    std::thread::scope(|s| {
        let ranks: Vec<_> = group
            .iter()
            .map(|c| {
                s.spawn(move || {
                    c.all_reduce(&mut vec![0f32; 100_000], Reduction::Sum).unwrap_err().to_string()
                })
            })
            .collect();
        std::thread::sleep(Duration::from_millis(50));
        drop(gone);
        for r in ranks {
            let e = r.join().unwrap();
            assert!(e.contains("rank 2") && e.contains("all_reduce #1"), "{e}");
        }
    });
}

#[test]
fn different_operations_are_told() {
    let group = Communicator::local(2, Duration::from_secs(30));
    let errors: Vec<String> = std::thread::scope(|s| {
        let ranks: Vec<_> = group
            .iter()
            .map(|c| {
                s.spawn(move || match c.rank() {
                    0 => c.all_reduce(&mut [0f32; 10], Reduction::Sum).unwrap_err().to_string(),
                    _ => c.broadcast(&mut [0f32; 9], 1).and_then(|()| c.barrier()).unwrap_err().to_string(),
                })
            })
            .collect();
        ranks.into_iter().map(|r| r.join().unwrap()).collect()
    });
    assert!(
        errors.iter().any(|e| e.contains("disagree") && e.contains("broadcast of 36 bytes")),
        "{errors:?}"
    );
}

#[test]
fn arguments_that_do_not_fit() {
    let c = Communicator::alone();
    let e = c.all_gather(&[1u8, 2], &[3]).unwrap_err().to_string();
    assert!(e.contains("its count says 3"), "{e}");
    let e = c.all_to_all(&[1u8, 2], &[1, 1], &[2]).unwrap_err().to_string();
    assert!(e.contains("expected 1, one a rank"), "{e}");
    assert!(c.send(&[1u8], 0).is_err() && c.broadcast(&mut [1u8], 4).is_err());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    /// Uneven counts of every kind.
    #[test]
    fn uneven(counts in proptest::collection::vec(0usize..700, 1..6), sizes in proptest::collection::vec(0usize..300, 36)) {
        let world = counts.len();
        local(world, |c| {
            let rank = c.rank();
            let whole: Vec<f32> = (0..world).flat_map(|r| vector(r, counts[r])).collect();
            assert_eq!(c.all_gather(&vector(rank, counts[rank]), &counts).unwrap(), whole);
            let total = counts.iter().sum();
            let part = c.reduce_scatter(vector(rank, total), &counts, Wire::F32).unwrap();
            let begin: usize = counts[..rank].iter().sum();
            let sum = exact(world, total);
            assert!(part.iter().zip(&sum[begin..]).all(|(a, b)| (f64::from(*a) - b).abs() < 1e-4));
            let size = |a: usize, b: usize| sizes[a * 6 + b];
            let sent: Vec<usize> = (0..world).map(|s| size(rank, s)).collect();
            let received: Vec<usize> = (0..world).map(|r| size(r, rank)).collect();
            let data: Vec<f32> = (0..world).flat_map(|s| vector(10 * rank + s, sent[s])).collect();
            let expected: Vec<f32> = (0..world).flat_map(|r| vector(10 * r + rank, received[r])).collect();
            assert_eq!(c.all_to_all(&data, &sent, &received).unwrap(), expected);
        });
    }
}
