//! A small straight-line program over scalars: what a `map` computes for each element, and what a matrix
//! product may do to its result before it stores it. Evaluated blockwise on the CPU, printed as WGSL for
//! the device, differentiated symbolically.

use super::Real;
use std::fmt::Write;

/// Operations on one value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Un {
    /// -x
    Neg,
    /// e^x
    Exp,
    /// ln x
    Ln,
    /// √x
    Sqrt,
    /// 1/x
    Recip,
    /// 1/√x
    Rsqrt,
    /// max(x, 0)
    Relu,
    /// 1/(1 + e^-x)
    Sigmoid,
    /// tanh x
    Tanh,
    /// ln(1 + e^x)
    Softplus,
    /// 1 where x > 0, else 0 (so relu'(0) = 0)
    Step,
}

/// Operations on two values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Bin {
    /// a + b
    Add,
    /// a - b
    Sub,
    /// a · b
    Mul,
    /// a / b
    Div,
    /// the larger
    Max,
    /// the smaller
    Min,
}

/// One instruction; operands are positions of earlier instructions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Ins {
    /// Input `i` of the map.
    In(u16),
    /// A number.
    Const(f64),
    /// One operand.
    Un(Un, u16),
    /// Two operands.
    Bin(Bin, u16, u16),
}

/// A program; its value is that of the last instruction.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Expr {
    /// The instructions.
    pub ins: Vec<Ins>,
}

/// Number of elements that the CPU evaluates at a time.
pub const BLOCK: usize = 256;

impl Expr {
    /// The program "input `i`".
    pub fn input(i: usize) -> Self {
        Expr { ins: vec![Ins::In(i as u16)] }
    }

    /// `un(input 0)`
    pub fn unary(u: Un) -> Self {
        let mut e = Expr::input(0);
        e.un(u, 0);
        e
    }

    /// `bin(input 0, input 1)`
    pub fn binary(b: Bin) -> Self {
        let mut e = Expr { ins: vec![Ins::In(0), Ins::In(1)] };
        e.bin(b, 0, 1);
        e
    }

    /// Appends an instruction, reusing an equal earlier one; returns its position.
    pub fn add(&mut self, i: Ins) -> u16 {
        // the last instruction is the value, so a repeated final instruction is found by the caller's index
        if let Some(p) = self.ins.iter().position(|x| *x == i) {
            return p as u16;
        }
        self.ins.push(i);
        (self.ins.len() - 1) as u16
    }

    /// Appends `u(a)`.
    pub fn un(&mut self, u: Un, a: u16) -> u16 {
        self.add(Ins::Un(u, a))
    }

    /// Appends `b(a, c)` with the obvious simplifications of 0 and 1.
    pub fn bin(&mut self, b: Bin, a: u16, c: u16) -> u16 {
        let is = |p: u16, v: f64| self.ins[p as usize] == Ins::Const(v);
        match b {
            Bin::Mul if is(a, 1.0) => return c,
            Bin::Mul if is(c, 1.0) => return a,
            Bin::Add if is(a, 0.0) => return c,
            Bin::Add if is(c, 0.0) => return a,
            _ => {}
        }
        self.add(Ins::Bin(b, a, c))
    }

    /// Appends a number.
    pub fn num(&mut self, v: f64) -> u16 {
        self.add(Ins::Const(v))
    }

    /// Appends input `i`.
    pub fn arg(&mut self, i: usize) -> u16 {
        self.add(Ins::In(i as u16))
    }

    /// Keeps what instruction `root` needs, and makes it the value.
    pub fn finish(self, root: u16) -> Self {
        let mut need = vec![false; self.ins.len()];
        need[root as usize] = true;
        for p in (0..self.ins.len()).rev().filter(|&p| p <= root as usize) {
            if need[p] {
                match self.ins[p] {
                    Ins::Un(_, a) => need[a as usize] = true,
                    Ins::Bin(_, a, b) => {
                        need[a as usize] = true;
                        need[b as usize] = true;
                    }
                    _ => {}
                }
            }
        }
        let mut at = vec![0u16; self.ins.len()];
        let mut ins = vec![];
        for (p, i) in self.ins.iter().enumerate().take(root as usize + 1) {
            if need[p] {
                at[p] = ins.len() as u16;
                ins.push(match *i {
                    Ins::Un(u, a) => Ins::Un(u, at[a as usize]),
                    Ins::Bin(b, x, y) => Ins::Bin(b, at[x as usize], at[y as usize]),
                    other => other,
                });
            }
        }
        Expr { ins }
    }

    /// Which inputs it reads, ascending.
    pub fn used_inputs(&self) -> Vec<usize> {
        let mut v: Vec<usize> = self
            .ins
            .iter()
            .filter_map(|i| if let Ins::In(k) = i { Some(*k as usize) } else { None })
            .collect();
        v.sort_unstable();
        v.dedup();
        v
    }

    /// The same program with inputs renumbered.
    pub fn renumber(&self, f: impl Fn(usize) -> usize) -> Self {
        let ins = self.ins.iter().map(|i| match i {
            Ins::In(k) => Ins::In(f(*k as usize) as u16),
            o => *o,
        });
        Expr { ins: ins.collect() }
    }

    /// `self` with its input `i` replaced by `inner` (whose inputs are already numbered as `self`'s).
    pub fn inline(&self, i: usize, inner: &Expr) -> Self {
        let mut e = Expr::default();
        let mut map_inner = Vec::with_capacity(inner.ins.len());
        for ins in &inner.ins {
            let p = e.copy(*ins, &map_inner);
            map_inner.push(p);
        }
        let root_inner = *map_inner.last().expect("an expression has a value");
        let mut map = Vec::with_capacity(self.ins.len());
        for ins in &self.ins {
            let p = if *ins == Ins::In(i as u16) { root_inner } else { e.copy(*ins, &map) };
            map.push(p);
        }
        let root = *map.last().expect("an expression has a value");
        e.finish(root)
    }

    fn copy(&mut self, i: Ins, at: &[u16]) -> u16 {
        match i {
            Ins::Un(u, a) => self.un(u, at[a as usize]),
            Ins::Bin(b, x, y) => self.bin(b, at[x as usize], at[y as usize]),
            o => self.add(o),
        }
    }

    /// d(value)/d(input `wrt`) times input `grad`, where input `out` may stand for the program's own value.
    /// `None` if the value does not depend on the input.
    pub fn derivative(&self, wrt: usize, grad: usize, out: usize) -> Option<Expr> {
        let mut e = self.clone();
        let last = self.ins.len() - 1;
        let mut adj: Vec<Option<u16>> = vec![None; self.ins.len()];
        adj[last] = Some(e.arg(grad));
        for p in (0..self.ins.len()).rev() {
            let Some(d) = adj[p] else { continue };
            match self.ins[p] {
                Ins::In(_) | Ins::Const(_) => {}
                Ins::Un(u, a) => {
                    // the value itself is at hand as an input for the last instruction: the operand need not
                    // be kept, so a producer can be fused away
                    let y = if p == last { e.arg(out) } else { p as u16 };
                    let f = match u {
                        Un::Neg => e.num(-1.0),
                        Un::Exp => y,
                        Un::Ln => e.un(Un::Recip, a),
                        Un::Sqrt => {
                            let half = e.num(0.5);
                            e.bin(Bin::Div, half, y)
                        }
                        Un::Recip => {
                            let s = e.bin(Bin::Mul, y, y);
                            e.un(Un::Neg, s)
                        }
                        Un::Rsqrt => {
                            let s = e.bin(Bin::Mul, y, y);
                            let c = e.bin(Bin::Mul, s, y);
                            let m = e.num(-0.5);
                            e.bin(Bin::Mul, m, c)
                        }
                        Un::Relu => e.un(Un::Step, y),
                        Un::Sigmoid => {
                            let one = e.num(1.0);
                            let q = e.bin(Bin::Sub, one, y);
                            e.bin(Bin::Mul, y, q)
                        }
                        Un::Tanh => {
                            let one = e.num(1.0);
                            let s = e.bin(Bin::Mul, y, y);
                            e.bin(Bin::Sub, one, s)
                        }
                        Un::Softplus => e.un(Un::Sigmoid, a),
                        Un::Step => continue,
                    };
                    let t = e.bin(Bin::Mul, d, f);
                    e.accumulate(&mut adj, a, t);
                }
                Ins::Bin(b, x, y) => {
                    let (dx, dy) = match b {
                        Bin::Add => (d, d),
                        Bin::Sub => (d, e.un(Un::Neg, d)),
                        Bin::Mul => (e.bin(Bin::Mul, d, y), e.bin(Bin::Mul, d, x)),
                        Bin::Div => {
                            let q = e.bin(Bin::Div, d, y);
                            let r = e.bin(Bin::Div, x, y);
                            let m = e.bin(Bin::Mul, q, r);
                            (q, e.un(Un::Neg, m))
                        }
                        Bin::Max | Bin::Min => {
                            let (hi, lo) = if b == Bin::Max { (x, y) } else { (y, x) };
                            let diff = e.bin(Bin::Sub, hi, lo);
                            let s = e.un(Un::Step, diff);
                            let one = e.num(1.0);
                            let n = e.bin(Bin::Sub, one, s);
                            (e.bin(Bin::Mul, d, s), e.bin(Bin::Mul, d, n))
                        }
                    };
                    e.accumulate(&mut adj, x, dx);
                    e.accumulate(&mut adj, y, dy);
                }
            }
        }
        let mut total = None;
        for (p, i) in self.ins.iter().enumerate() {
            if *i == Ins::In(wrt as u16)
                && let Some(d) = adj[p]
            {
                total = Some(match total {
                    None => d,
                    Some(t) => e.bin(Bin::Add, t, d),
                });
            }
        }
        total.map(|t| e.finish(t))
    }

    fn accumulate(&mut self, adj: &mut [Option<u16>], at: u16, d: u16) {
        let slot = adj[at as usize];
        adj[at as usize] = Some(match slot {
            None => d,
            Some(o) => self.bin(Bin::Add, o, d),
        });
    }

    /// Floating-point operations an element.
    pub fn flops(&self) -> usize {
        self.ins.iter().filter(|i| matches!(i, Ins::Un(..) | Ins::Bin(..))).count()
    }

    /// Evaluates on `n ≤ BLOCK` elements: `load(i, buf)` fills `buf[..n]` with input `i`.
    #[inline(always)]
    pub fn eval<T: Real>(&self, n: usize, regs: &mut Vec<[T; BLOCK]>, mut load: impl FnMut(usize, &mut [T])) {
        if regs.len() < self.ins.len() {
            regs.resize(self.ins.len(), [T::ZERO; BLOCK]);
        }
        for (p, ins) in self.ins.iter().enumerate() {
            let (done, rest) = regs.split_at_mut(p);
            let r = &mut rest[0][..n];
            match *ins {
                Ins::In(i) => load(i as usize, r),
                Ins::Const(v) => r.fill(T::of(v)),
                Ins::Un(u, a) => eval_un(u, &done[a as usize][..n], r),
                Ins::Bin(b, x, y) => eval_bin(b, &done[x as usize][..n], &done[y as usize][..n], r),
            }
        }
    }

    /// WGSL statements that compute the value of type `ty` (`f32` or `vec4<f32>`), and the name that holds it;
    /// `arg(i)` is the WGSL text of input `i`.
    pub fn wgsl(&self, ty: &str, prefix: &str, arg: impl Fn(usize) -> String) -> (String, String) {
        let mut s = String::new();
        let r = |p: u16| format!("{prefix}{p}");
        for (p, ins) in self.ins.iter().enumerate() {
            let _ = writeln!(s, "    let {} : {ty} = {};", r(p as u16), wgsl_ins(ins, ty, &r, &arg));
        }
        (s, r(self.ins.len() as u16 - 1))
    }

    /// The whole program as one scalar WGSL expression. What is used twice is computed twice.
    pub fn wgsl_inline(&self, arg: &dyn Fn(usize) -> String) -> String {
        let mut text: Vec<String> = Vec::with_capacity(self.ins.len());
        for ins in &self.ins {
            let t = format!("({})", wgsl_ins(ins, "f32", &|p| text[p as usize].clone(), arg));
            text.push(t);
        }
        text.pop().unwrap_or_default()
    }
}

/// WGSL text of one instruction.
fn wgsl_ins(ins: &Ins, ty: &str, r: &dyn Fn(u16) -> String, arg: &dyn Fn(usize) -> String) -> String {
    match *ins {
        Ins::In(i) => arg(i as usize),
        Ins::Const(v) => format!("{ty}({})", wgsl_f32(v)),
        Ins::Un(u, a) => {
            let a = r(a);
            match u {
                Un::Neg => format!("-{a}"),
                Un::Exp => format!("exp(clamp({a}, {ty}(-87.0), {ty}(88.0)))"),
                Un::Ln => format!("log({a})"),
                Un::Sqrt => format!("sqrt({a})"),
                Un::Recip => format!("{ty}(1.0) / {a}"),
                Un::Rsqrt => format!("{ty}(1.0) / sqrt({a})"),
                Un::Relu => format!("max({a}, {ty}(0.0))"),
                Un::Sigmoid => format!("{ty}(1.0) / ({ty}(1.0) + exp(clamp(-{a}, {ty}(-87.0), {ty}(87.0))))"),
                // clamped: some drivers compute tanh as a ratio of exponentials that overflow
                Un::Tanh => format!("tanh(clamp({a}, {ty}(-15.0), {ty}(15.0)))"),
                Un::Softplus => format!(
                    "max({a}, {ty}(0.0)) + log({ty}(1.0) + exp(clamp(-abs({a}), {ty}(-87.0), {ty}(0.0))))"
                ),
                Un::Step => format!("select({ty}(0.0), {ty}(1.0), {a} > {ty}(0.0))"),
            }
        }
        Ins::Bin(b, x, y) => {
            let (x, y) = (r(x), r(y));
            match b {
                Bin::Add => format!("{x} + {y}"),
                Bin::Sub => format!("{x} - {y}"),
                Bin::Mul => format!("{x} * {y}"),
                Bin::Div => format!("{x} / {y}"),
                Bin::Max => format!("max({x}, {y})"),
                Bin::Min => format!("min({x}, {y})"),
            }
        }
    }
}

/// A float literal that WGSL accepts.
pub fn wgsl_f32(v: f64) -> String {
    let s = format!("{:?}", v as f32);
    if s.contains('e') && !s.contains('.') { s.replacen('e', ".0e", 1) } else { s }
}

// Closures written into a loop by a macro, for the compiler to vectorise.
#[allow(clippy::redundant_closure_call)]
#[inline(always)]
fn eval_un<T: Real>(u: Un, a: &[T], r: &mut [T]) {
    macro_rules! each {
        ($f:expr) => {
            for (r, a) in r.iter_mut().zip(a) {
                let f = $f;
                *r = f(*a);
            }
        };
    }
    match u {
        Un::Neg => each!(|a: T| -a),
        Un::Exp => each!(|a: T| a.exp()),
        Un::Ln => each!(|a: T| a.ln()),
        Un::Sqrt => each!(|a: T| a.sqrt()),
        Un::Recip => each!(|a: T| T::ONE / a),
        Un::Rsqrt => each!(|a: T| T::ONE / a.sqrt()),
        Un::Relu => each!(|a: T| a.max(T::ZERO)),
        Un::Sigmoid => each!(|a: T| a.sigmoid()),
        Un::Tanh => each!(|a: T| a.tanh()),
        Un::Softplus => each!(|a: T| a.softplus()),
        Un::Step => each!(|a: T| if a > T::ZERO { T::ONE } else { T::ZERO }),
    }
}

#[allow(clippy::redundant_closure_call)]
#[inline(always)]
fn eval_bin<T: Real>(b: Bin, x: &[T], y: &[T], r: &mut [T]) {
    macro_rules! each {
        ($f:expr) => {
            for ((r, x), y) in r.iter_mut().zip(x).zip(y) {
                let f = $f;
                *r = f(*x, *y);
            }
        };
    }
    match b {
        Bin::Add => each!(|x: T, y: T| x + y),
        Bin::Sub => each!(|x: T, y: T| x - y),
        Bin::Mul => each!(|x: T, y: T| x * y),
        Bin::Div => each!(|x: T, y: T| x / y),
        Bin::Max => each!(|x: T, y: T| x.max(y)),
        Bin::Min => each!(|x: T, y: T| x.min(y)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(e: &Expr, x: &[f64]) -> f64 {
        let mut regs = vec![];
        e.eval::<f64>(1, &mut regs, |i, b| b[0] = x[i]);
        regs[e.ins.len() - 1][0]
    }

    #[test]
    fn derivatives_meet_finite_differences() {
        for u in [
            Un::Neg,
            Un::Exp,
            Un::Ln,
            Un::Sqrt,
            Un::Recip,
            Un::Rsqrt,
            Un::Relu,
            Un::Sigmoid,
            Un::Tanh,
            Un::Softplus,
        ] {
            // un(x0·x1) / (x0 + 2): the unary in the middle
            let mut e = Expr::default();
            let (a, b) = (e.arg(0), e.arg(1));
            let p = e.bin(Bin::Mul, a, b);
            let q = e.un(u, p);
            let two = e.num(2.0);
            let s = e.bin(Bin::Add, a, two);
            e.bin(Bin::Div, q, s);
            for wrt in 0..2 {
                let d = e.derivative(wrt, 2, 3).unwrap();
                let x = [0.7, 1.3];
                let y = value(&e, &x);
                let got = value(&d, &[x[0], x[1], 1.5, y]);
                let h = 1e-6;
                let (mut lo, mut hi) = (x, x);
                lo[wrt] -= h;
                hi[wrt] += h;
                let want = 1.5 * (value(&e, &hi) - value(&e, &lo)) / (2.0 * h);
                assert!((got - want).abs() < 1e-8, "{u:?} {wrt}: {got} {want}");
            }
            // and as the last instruction, through the value
            let e = Expr::unary(u);
            let d = e.derivative(0, 1, 2).unwrap();
            let y = value(&e, &[0.7]);
            let want = (value(&e, &[0.7 + 1e-6]) - value(&e, &[0.7 - 1e-6])) / 2e-6;
            assert!((value(&d, &[0.7, 1.0, y]) - want).abs() < 1e-8, "{u:?}");
        }
    }

    #[test]
    fn inlining_keeps_the_value() {
        let inner = {
            let mut e = Expr::binary(Bin::Mul);
            let p = e.ins.len() as u16 - 1;
            e.un(Un::Tanh, p);
            e
        };
        let outer = Expr::binary(Bin::Sub).renumber(|i| if i == 0 { 2 } else { 0 }); // x2 - x0
        let e = outer.inline(2, &inner); // tanh(x0·x1) - x0
        assert!((value(&e, &[0.3, 0.5]) - ((0.15f64).tanh() - 0.3)).abs() < 1e-15);
    }
}
