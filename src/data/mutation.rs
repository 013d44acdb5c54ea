//! Damage to good files, for tests of readers.

use proptest::prelude::*;

use super::blocks::LONGEST_LINE;

/// One piece of damage; places are taken modulo the file's length.
#[derive(Clone, Debug)]
pub enum Mutation {
    Truncate(usize),
    Flip(usize, u8),
    Insert(usize, &'static [u8]),
    Delete(usize, usize),
    Swap(u8, u8),
    Repeat(usize, usize),
    LongLine(usize),
}

/// Any of them.
pub fn mutation() -> impl Strategy<Value = Mutation> {
    let insert = prop::sample::select(vec![
        &b"\0"[..],
        b"\t",
        b",",
        b"\n",
        b"\r",
        b"\r\n",
        b"\"",
        b"\"\"",
        b"\xff",
        b"\xc3",
        b"\xef\xbb\xbf",
        b"\t\t\t",
        b"\n\n",
        b":",
        b" 3:1 3:1",
        b"user,user",
        b"PAR1",
        b"ARROW1",
    ]);
    let swaps = vec![(b',', b'\t'), (b'\t', b','), (b',', b';'), (b' ', b','), (b':', b' '), (b'\n', b'\r')];
    prop_oneof![
        any::<usize>().prop_map(Mutation::Truncate),
        (any::<usize>(), 1u8..).prop_map(|(i, b)| Mutation::Flip(i, b)),
        (any::<usize>(), insert).prop_map(|(i, b)| Mutation::Insert(i, b)),
        (any::<usize>(), 1usize..300).prop_map(|(i, n)| Mutation::Delete(i, n)),
        prop::sample::select(swaps).prop_map(|(a, b)| Mutation::Swap(a, b)),
        (any::<usize>(), 1usize..200_000).prop_map(|(i, n)| Mutation::Repeat(i, n)),
        any::<usize>().prop_map(Mutation::LongLine),
    ]
}

/// Damages a file.
pub fn mutate(bytes: &mut Vec<u8>, mutation: &Mutation) {
    let length = bytes.len().max(1);
    let place = |i: usize| (i % length).min(bytes.len());
    match *mutation {
        Mutation::Truncate(i) => bytes.truncate(i % length),
        Mutation::Flip(i, b) => {
            if let Some(byte) = bytes.get_mut(i % length) {
                *byte ^= b;
            }
        }
        Mutation::Insert(i, what) => {
            let at = place(i);
            bytes.splice(at..at, what.iter().copied());
        }
        Mutation::Delete(i, n) => {
            let at = place(i);
            bytes.drain(at..(at + n).min(bytes.len()));
        }
        Mutation::Swap(a, b) => bytes.iter_mut().filter(|x| **x == a).for_each(|x| *x = b),
        Mutation::Repeat(i, n) => {
            let at = place(i);
            let byte = bytes.get(at).copied().unwrap_or(b'z');
            bytes.splice(at..at, std::iter::repeat_n(byte, n));
        }
        Mutation::LongLine(i) => {
            let at = place(i);
            bytes.splice(at..at, std::iter::repeat_n(b'z', 3 * LONGEST_LINE));
        }
    }
}
