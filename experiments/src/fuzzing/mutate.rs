//! Changes to good input: what editors, terminals, transfers and attackers do to files.

/// SplitMix64: one multiplication chain a number, the same on every machine.
#[derive(Debug, Clone)]
pub(super) struct SplitMix64(u64);

impl SplitMix64 {
    /// The stream of one run of one seed; runs do not depend on each other.
    pub(super) fn of_run(seed: u64, run: u64) -> Self {
        let mut mixed = Self(seed ^ run.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        Self(mixed.next())
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `end`; zero where that is zero.
    pub(super) fn below(&mut self, end: usize) -> usize {
        match end {
            0 => 0,
            _ => (self.next() % end as u64) as usize,
        }
    }

    fn pick<'a, T>(&mut self, items: &'a [T]) -> &'a T {
        &items[self.below(items.len())]
    }
}

/// Longest input that is made.
const LENGTH_LIMIT: usize = 1 << 20;

/// Words that mean something to one reader or another.
const WORDS: [&str; 46] = [
    "0",
    "-1",
    "1",
    "NaN",
    "Infinity",
    "-Infinity",
    "null",
    "true",
    "[]",
    "{}",
    "\"\"",
    "1e999",
    "1e-999",
    "18446744073709551615",
    "18446744073709551616",
    "9223372036854775807",
    "4294967295",
    "2147483648",
    "1099511627776",
    "0.1",
    "\u{feff}",
    "\0",
    "\r\n",
    "\t",
    "\u{1b}[31m",
    "\u{1b}[",
    "<",
    ">",
    "</",
    "<!--",
    "<!ENTITY a \"b\">",
    "&a;",
    "[0-1099511627776]",
    "node[1-9,1-9]",
    "GPU0",
    "NV12",
    "SYS",
    " X ",
    "[N/A]",
    "&a *a",
    "---\n",
    "]]>",
    "${x}",
    "%s",
    "../",
    "schema",
];

/// A little-endian number as binary headers hold them.
const NUMBERS: [u64; 9] = [
    0,
    1,
    7,
    1 << 20,
    1 << 31,
    1 << 32,
    1 << 60,
    u64::MAX >> 1,
    u64::MAX,
];

/// A changed copy of one of the inputs.
pub(super) fn mutate(inputs: &[Vec<u8>], random: &mut SplitMix64) -> Vec<u8> {
    let mut bytes = random.pick(inputs).clone();
    for _ in 0..=random.below(4) {
        step(&mut bytes, inputs, random);
    }
    bytes.truncate(LENGTH_LIMIT);
    bytes
}

fn step(bytes: &mut Vec<u8>, inputs: &[Vec<u8>], random: &mut SplitMix64) {
    let at = random.below(bytes.len() + 1);
    match random.below(12) {
        0 => flip(bytes, random),
        1 => overwrite(bytes, at, &[random.next() as u8]),
        2 => insert(bytes, at, random.pick(&WORDS).as_bytes()),
        3 => overwrite(bytes, at, random.pick(&WORDS).as_bytes()),
        4 => overwrite(bytes, at, &random.pick(&NUMBERS).to_le_bytes()),
        5 => {
            let end = at + random.below(64.min(bytes.len() - at) + 1);
            bytes.drain(at..end);
        }
        6 => {
            let end = at + random.below(256.min(bytes.len() - at) + 1);
            let piece = bytes[at..end].to_vec();
            insert(bytes, at, &piece);
        }
        7 => cut(bytes, random),
        8 => {
            let other = random.pick(inputs);
            let from = random.below(other.len() + 1);
            bytes.truncate(at);
            bytes.extend(&other[from..]);
        }
        9 => number(bytes, random),
        10 => lines(bytes, random),
        _ => {
            let piece = [*random.pick(b"[{(<\"'- 0,:\n\t")].repeat(1 + random.below(300));
            insert(bytes, at, &piece);
        }
    }
}

fn flip(bytes: &mut [u8], random: &mut SplitMix64) {
    let at = random.below(bytes.len());
    if let Some(byte) = bytes.get_mut(at) {
        *byte ^= 1 << random.below(8);
    }
}

fn insert(bytes: &mut Vec<u8>, at: usize, piece: &[u8]) {
    bytes.splice(at..at, piece.iter().copied());
}

fn overwrite(bytes: &mut Vec<u8>, at: usize, piece: &[u8]) {
    let end = bytes.len().min(at + piece.len());
    bytes.splice(at..end, piece.iter().copied());
}

/// Cuts where structure ends: at a line, a bracket, a comma, a tag.
fn cut(bytes: &mut Vec<u8>, random: &mut SplitMix64) {
    let marks: Vec<usize> = (0..bytes.len())
        .filter(|at| b"\n{}[],<>:".contains(&bytes[*at]))
        .collect();
    let at = match marks.is_empty() {
        true => random.below(bytes.len()),
        false => *random.pick(&marks) + random.below(2),
    };
    bytes.truncate(at);
}

/// Replaces one run of digits.
fn number(bytes: &mut Vec<u8>, random: &mut SplitMix64) {
    let start = random.below(bytes.len());
    let Some(from) = bytes[start..]
        .iter()
        .position(u8::is_ascii_digit)
        .map(|at| at + start)
    else {
        return;
    };
    let digits = bytes[from..]
        .iter()
        .take_while(|byte| byte.is_ascii_digit())
        .count();
    let word = WORDS[random.below(20)].as_bytes().to_vec();
    bytes.splice(from..from + digits, word);
}

/// Moves, doubles or drops a line.
fn lines(bytes: &mut Vec<u8>, random: &mut SplitMix64) {
    let mut lines: Vec<Vec<u8>> = bytes
        .split_inclusive(|byte| *byte == b'\n')
        .map(<[u8]>::to_vec)
        .collect();
    let (one, other) = (random.below(lines.len()), random.below(lines.len()));
    match (lines.is_empty(), random.below(3)) {
        (true, _) => {}
        (_, 0) => lines.swap(one, other),
        (_, 1) => {
            let copy = lines[one].clone();
            lines.insert(other, copy);
        }
        _ => {
            lines.remove(one);
        }
    }
    *bytes = lines.concat();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_is_the_same_whenever_it_is_made() {
        let inputs = [b"{\"a\": [1, 2]}\n".to_vec(), b"x,y\n1,2\n".to_vec(), Vec::new()];
        let made = |run| mutate(&inputs, &mut SplitMix64::of_run(7, run));
        let all: Vec<Vec<u8>> = (0..2000).map(made).collect();
        assert_eq!(all, (0..2000).map(made).collect::<Vec<_>>());
        let mut kinds = all.clone();
        kinds.sort();
        kinds.dedup();
        assert!(kinds.len() > 1000, "{} different inputs", kinds.len());
    }
}
