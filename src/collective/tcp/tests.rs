use super::super::tests::{WORLDS, all_operations, in_flight, on, splits, vector};
use super::super::{Communicator, Reduction};
use super::*;
use rand::{Rng, SeedableRng};
use std::io::Write;

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").expect("loopback").local_addr().expect("bound").port()
}

fn options(rank: usize, world: usize, port: u16) -> TcpOptions {
    TcpOptions {
        rank,
        world,
        master: "127.0.0.1".into(),
        port,
        bind: None,
        secret: b"a secret".to_vec(),
        job: "test".into(),
        timeout: Duration::from_secs(20),
        join_timeout: Duration::from_secs(20),
        lanes: 1,
        several_hosts: false,
    }
}

/// A group of threads that meet over TCP.
fn group(world: usize, change: impl Fn(&mut TcpOptions) + Sync) -> Vec<Communicator> {
    let port = free_port();
    std::thread::scope(|s| {
        let change = &change;
        let ranks: Vec<_> = (0..world)
            .map(|rank| {
                s.spawn(move || {
                    let mut o = options(rank, world, port);
                    change(&mut o);
                    Communicator::new(Box::new(Tcp::join(&o).expect("all join")))
                })
            })
            .collect();
        ranks.into_iter().map(|r| r.join().expect("no panic")).collect()
    })
}

#[test]
fn every_operation() {
    for world in WORLDS {
        let g = group(world, |_| ());
        on(g, |c| {
            for n in [0, 1, 1237, 70_001] {
                all_operations(&c, n);
            }
        });
    }
}

#[test]
fn large_sums() {
    for (world, lanes) in [(2, 1), (3, 2), (4, 1)] {
        on(group(world, |o| o.lanes = lanes), |c| all_operations(&c, 4 << 20));
    }
}

#[test]
fn a_hundred_in_flight() {
    on(group(4, |_| ()), |c| in_flight(&c));
}

#[test]
fn groups_within_a_group() {
    for world in [1, 2, 5] {
        on(group(world, |_| ()), |c| splits(&c));
    }
}

/// The same bits as threads give.
#[test]
fn transports_agree() {
    let sum = |g| {
        on(g, |c: Communicator| {
            let mut v = vector(c.rank(), 200_000);
            c.all_reduce(&mut v, Reduction::Sum).unwrap();
            v.iter().map(|x| x.to_bits()).collect::<Vec<_>>()
        })
    };
    assert_eq!(sum(group(3, |_| ())), sum(Communicator::local(3, Duration::from_secs(20))));
}

/// Joins one rank alone, expecting an error.
fn refused(rank: usize, world: usize, port: u16, change: impl Fn(&mut TcpOptions)) -> String {
    let mut o = options(rank, world, port);
    o.join_timeout = Duration::from_millis(600);
    change(&mut o);
    Tcp::join(&o).err().expect("refused").to_string()
}

#[test]
fn who_does_not_belong_is_refused_and_harms_nobody() {
    let port = free_port();
    std::thread::scope(|s| {
        let first = s.spawn(move || Tcp::join(&options(0, 3, port)).expect("rank 0"));
        let second = s.spawn(move || Tcp::join(&options(1, 3, port)).expect("rank 1"));
        std::thread::sleep(Duration::from_millis(200));
        let e = refused(2, 3, port, |o| o.secret = b"wrong".to_vec());
        assert!(e.contains("BIRKHOFF_SECRET"), "{e}");
        let e = refused(2, 3, port, |o| o.job = "other".into());
        assert!(e.contains("another job"), "{e}");
        let e = refused(1, 3, port, |_| ());
        assert!(e.contains("started twice"), "{e}");
        let e = refused(2, 4, port, |_| ());
        assert!(e.contains("world of 4"), "{e}");
        let e = refused(0, 2, port, |_| ());
        assert!(e.contains("is taken"), "{e}");
        let e = refused(1, 2, port, |o| o.secret.clear());
        assert!(e.contains("BIRKHOFF_SECRET is not set"), "{e}");
        let third = s.spawn(move || Tcp::join(&options(2, 3, port)).expect("rank 2"));
        let all: Vec<_> = [first, second, third].into_iter().map(|t| t.join().unwrap()).collect();
        let e = refused(2, 3, port, |_| ());
        assert!(e.contains("started twice"), "{e}");
        let g = all.into_iter().map(|t| Communicator::new(Box::new(t))).collect();
        on(g, |c| all_operations(&c, 1000));
    });
}

#[test]
fn who_is_missing_is_named() {
    let e = refused(0, 3, free_port(), |_| ());
    assert!(e.contains("ranks 1, 2 did not join within"), "{e}");
    let e = refused(1, 3, free_port(), |_| ());
    assert!(e.contains("rank 1 found no master"), "{e}");
}

/// Random bytes at every door while a group forms and works: it must not notice.
#[test]
fn strangers() {
    let port = free_port();
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|s| {
        let stop = &stop;
        let stranger = s.spawn(move || {
            let mut rng = rand::rngs::StdRng::seed_from_u64(5);
            let mut sent = 0;
            while !stop.load(std::sync::atomic::Ordering::SeqCst) {
                let Ok(mut c) = TcpStream::connect(("127.0.0.1", port)) else { continue };
                let mut bytes = vec![0u8; rng.next_u32() as usize % 5000];
                rng.fill_bytes(&mut bytes);
                if sent % 2 == 0 && bytes.len() > 12 {
                    bytes[..12].copy_from_slice(b"birkhoff\x01\0\0\0");
                }
                let _ = c.write_all(&bytes);
                sent += 1;
            }
            sent
        });
        let ranks: Vec<_> = (0..3)
            .map(|r| {
                s.spawn(move || {
                    std::thread::sleep(Duration::from_millis(50 * r as u64));
                    let c = Communicator::new(Box::new(Tcp::join(&options(r, 3, port)).expect("joins")));
                    for _ in 0..20 {
                        all_operations(&c, 3000);
                    }
                    c.finish().expect("ends");
                })
            })
            .collect();
        let ended: Vec<bool> = ranks.into_iter().map(|r| r.join().is_ok()).collect();
        stop.store(true, std::sync::atomic::Ordering::SeqCst);
        assert!(stranger.join().unwrap() > 10);
        assert_eq!(ended, [true; 3]);
    });
}

/// A rank that stops is named on every other, in its own words, with whether another try may do.
#[test]
fn a_rank_that_stops_is_known_everywhere() {
    for for_good in [false, true] {
        stops(for_good);
    }
}

fn stops(for_good: bool) {
    let mut g = group(4, |_| ());
    let gone = g.remove(2);
    std::thread::scope(|s| {
        let others: Vec<_> = g
            .iter()
            .map(|c| s.spawn(move || c.all_reduce(&mut vec![0f32; 1 << 20], Reduction::Sum).unwrap_err()))
            .collect();
        std::thread::sleep(Duration::from_millis(50));
        gone.abort("its disk is full", for_good);
        for o in others {
            let e = o.join().unwrap();
            assert_eq!(e.to_string(), "rank 2 stopped: its disk is full");
            assert_eq!((e.because_of(), e.may_pass()), (Some(2), !for_good));
        }
    });
}

#[test]
fn disagreement_is_told_everywhere() {
    let g = group(3, |_| ());
    let errors: Vec<String> = std::thread::scope(|s| {
        let ranks: Vec<_> = g
            .iter()
            .map(|c| {
                s.spawn(move || {
                    match c.rank() {
                        1 => c.broadcast(&mut vec![0u8; 500], 1).and_then(|()| c.barrier()),
                        _ => c.all_reduce(&mut vec![0f32; 100], Reduction::Sum),
                    }
                    .unwrap_err()
                    .to_string()
                })
            })
            .collect();
        ranks.into_iter().map(|r| r.join().unwrap()).collect()
    });
    assert!(errors.iter().all(|e| e.contains("disagree")), "{errors:?}");
}

/// Rank 1's process is stopped: here its watching thread, which is what answers for it.
#[test]
fn a_silent_rank_is_an_error_within_the_timeout() {
    let port = free_port();
    let timeout = Duration::from_millis(900);
    std::thread::scope(|s| {
        let ranks: Vec<_> = [0, 2]
            .map(|r| {
                s.spawn(move || {
                    let c = Communicator::new(Box::new(
                        Tcp::join(&TcpOptions { timeout, ..options(r, 3, port) }).expect("joins"),
                    ));
                    let begin = Instant::now();
                    let e = c.all_reduce(&mut [1f32], Reduction::Sum).unwrap_err().to_string();
                    (e, begin.elapsed())
                })
            })
            .into_iter()
            .collect();
        // joins, connects, and says nothing more: the handshakes without the transport
        let o = options(1, 3, port);
        let job = xxh3_64(o.job.as_bytes());
        let (door, doors, _control) =
            Tcp::join_master(&o, job, Instant::now() + o.join_timeout).expect("joins");
        let hello = Hello { joins: false, job, group: 0, rank: 1, world: 3, lane: 0, port: 0 };
        let mut lower = connect(doors[0]).unwrap();
        auth::call(&mut lower, &o.secret, hello).unwrap().unwrap();
        let _higher = door.wait((0, 2, 0), Instant::now() + o.join_timeout).expect("rank 2 comes");
        for r in ranks {
            let (e, took) = r.join().unwrap();
            assert!(e.contains("rank 1 was lost") && e.contains("--collective-timeout"), "{e}");
            assert!(took < timeout * 2, "{took:?}");
        }
    });
}

/// A frame that is not one.
#[test]
fn garbage_instead_of_a_frame() {
    let port = free_port();
    std::thread::scope(|s| {
        let rank = s.spawn(move || {
            let c = Communicator::new(Box::new(Tcp::join(&options(0, 2, port)).expect("joins")));
            c.all_reduce(&mut [1f32], Reduction::Sum).unwrap_err().to_string()
        });
        let o = options(1, 2, port);
        let job = xxh3_64(o.job.as_bytes());
        let (_door, doors, _control) =
            Tcp::join_master(&o, job, Instant::now() + o.join_timeout).expect("joins");
        let hello = Hello { joins: false, job, group: 0, rank: 1, world: 2, lane: 0, port: 0 };
        let mut data = connect(doors[0]).unwrap();
        auth::call(&mut data, &o.secret, hello).unwrap().unwrap();
        data.write_all(&[0x42; 100]).unwrap();
        let e = rank.join().unwrap();
        assert!(e.contains("a damaged frame from rank 1"), "{e}");
    });
}

#[test]
fn rank_0_listens_where_the_others_come_in() {
    let ip = |s: &str| s.parse::<IpAddr>().unwrap();
    let (own, lan, six) = (ip("127.0.1.1"), ip("10.0.0.5"), ip("fd00::5"));
    // Debian's /etc/hosts
    assert_eq!(choose(&[own], "node1", true), None);
    assert_eq!(choose(&[own], "node1", false), Some(own));
    assert_eq!(choose(&[own, lan], "node1", true), Some(lan));
    assert_eq!(choose(&[ip("::1"), own, six], "node1", true), Some(six));
    assert_eq!(choose(&[six, lan], "node1", true), Some(lan));
    assert_eq!(choose(&[six], "node1", false), Some(six));
    // who says so means it: two launchers on one machine
    assert_eq!(choose(&[ip("127.0.0.1")], "127.0.0.1", true), Some(ip("127.0.0.1")));
    assert_eq!(choose(&[ip("::1")], "localhost", true), Some(ip("::1")));
}
