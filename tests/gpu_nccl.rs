//! NCCL between the devices of this machine, one thread a device: `cargo test --release --features nccl --test gpu_nccl`.
//! Where there is no NCCL or no device it says so and checks nothing.

use birkhoff::collective::nccl::{Nccl, devices};
use birkhoff::collective::tcp::{Tcp, TcpOptions};
use birkhoff::collective::{CollectiveError, Communicator, Wire};
use std::time::{Duration, Instant};

fn value(rank: usize, i: usize) -> f32 {
    ((i * 31 + rank * 17 + 5) % 1009) as f32 / 64.0 - 7.0
}

/// How many devices, or `None` with a line that says why there are none.
fn found() -> Option<usize> {
    match devices(1) {
        Ok(n) => Some(n.min(8)),
        Err(e @ CollectiveError::Unavailable { .. }) => {
            eprintln!("SKIP: {e}");
            None
        }
        Err(e) => panic!("{e}"),
    }
}

/// Runs `f` on every rank of a group, each with a device of its own.
fn on(world: usize, f: impl Fn(&Communicator) + Sync) {
    let port =
        std::net::TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).expect("loopback").port();
    std::thread::scope(|s| {
        for rank in 0..world {
            let f = &f;
            s.spawn(move || {
                let options = TcpOptions {
                    rank,
                    world,
                    master: "127.0.0.1".into(),
                    port,
                    bind: None,
                    secret: b"of a test".to_vec(),
                    job: "gpu_nccl".into(),
                    timeout: Duration::from_secs(20),
                    join_timeout: Duration::from_secs(60),
                    lanes: 1,
                    several_hosts: false,
                };
                let tcp = Tcp::join(&options).expect("the others join");
                let c = Communicator::new(Box::new(Nccl::join(tcp, rank).expect("a device a rank")));
                f(&c);
                c.finish().expect("all end");
            });
        }
    });
}

#[test]
fn sums_are_right_and_the_same_everywhere() {
    let Some(world) = found() else { return };
    eprintln!("{world} devices");
    on(world, |c| {
        // small ones go over TCP, the last in two parts
        for n in [1, 1000, 70_001, 1 << 20, (16 << 20) + 77] {
            let mut v: Vec<f32> = (0..n).map(|i| value(c.rank(), i)).collect();
            let begin = Instant::now();
            c.all_reduce_wire(&mut v, Wire::F32, None).expect("a sum");
            if c.rank() == 0 {
                eprintln!("{n} f32: {:.3} ms", begin.elapsed().as_secs_f64() * 1e3);
            }
            for (i, x) in v.iter().enumerate() {
                let exact: f64 = (0..world).map(|r| f64::from(value(r, i))).sum();
                assert!((f64::from(*x) - exact).abs() < 1e-4, "{n} {i}: {x} {exact}");
            }
            let hash = v.iter().fold(0u64, |h, x| h.rotate_left(5) ^ u64::from(x.to_bits()));
            let all = c.all_gather(&[hash], &vec![1; world]).expect("all");
            assert!(all.iter().all(|h| *h == hash), "{n}");
        }
    });
}

#[test]
fn groups_within_a_group() {
    let Some(world) = found() else { return };
    on(world, |c| {
        let half = c.split(Some((c.rank() % 2) as u32), 0).expect("groups").expect("a member");
        let mut v = vec![1f32; 100_000];
        half.all_reduce_wire(&mut v, Wire::F32, None).expect("a sum");
        assert!(v.iter().all(|x| *x == half.world() as f32));
    });
}

#[test]
fn a_lost_rank_ends_the_others() {
    let Some(world) = found() else { return };
    if world < 2 {
        eprintln!("SKIP: one device");
        return;
    }
    on_until_lost(world);
}

fn on_until_lost(world: usize) {
    let heard = std::sync::atomic::AtomicUsize::new(0);
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        on(world, |c| {
            c.barrier().expect("all are there");
            if c.rank() == world - 1 {
                std::thread::sleep(Duration::from_millis(300));
                c.abort("its disk is full", false);
                return;
            }
            let e = c.all_reduce_wire(&mut vec![1f32; 1 << 20], Wire::F32, None).expect_err("one is gone");
            let e = e.to_string();
            assert!(e.contains(&format!("rank {} stopped: its disk is full", world - 1)), "{e}");
            heard.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
        });
    }));
    // `finish` fails on all, as it should
    assert!(result.is_err());
    assert_eq!(heard.into_inner(), world - 1);
}
