//! Host lists of Slurm: `node[001-008,010]`, `rack[1-2]n[01-04]`, `a,b[1-3]`.

/// Hosts that one file may name.
pub(super) const HOSTS_LIMIT: u64 = 65_536;
/// Bracketed parts of one name.
const PARTS_LIMIT: usize = 4;

/// Why a text is no host list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Fault {
    /// A bracket is not closed, or a range is none.
    Malformed,
    /// More hosts than any cluster has.
    TooMany,
}

/// Every host of a list, in its order; counted before any name is made.
pub(super) fn expand(list: &str) -> Result<Vec<String>, Fault> {
    let items: Vec<&str> = split(list)?;
    let mut total = 0_u64;
    let mut parsed = Vec::new();
    for item in items {
        let parts = parts(item)?;
        let count = parts.iter().map(Part::count).try_fold(1_u64, u64::checked_mul);
        total = total.saturating_add(count.unwrap_or(u64::MAX));
        if total > HOSTS_LIMIT {
            return Err(Fault::TooMany);
        }
        parsed.push(parts);
    }
    Ok(parsed.iter().flat_map(|parts| names(parts)).collect())
}

/// Cuts at commas outside brackets.
fn split(list: &str) -> Result<Vec<&str>, Fault> {
    let mut items = Vec::new();
    let (mut start, mut is_inside) = (0, false);
    for (position, letter) in list.char_indices() {
        match letter {
            '[' if is_inside => return Err(Fault::Malformed),
            '[' => is_inside = true,
            ']' if !is_inside => return Err(Fault::Malformed),
            ']' => is_inside = false,
            ',' if !is_inside => {
                items.push(&list[start..position]);
                start = position + 1;
            }
            _ => {}
        }
    }
    items.push(&list[start..]);
    if is_inside || items.iter().any(|item| item.is_empty()) {
        return Err(Fault::Malformed);
    }
    Ok(items)
}

#[derive(Debug, PartialEq)]
enum Part<'a> {
    Text(&'a str),
    /// First, last, digits.
    Ranges(Vec<(u64, u64, usize)>),
}

impl Part<'_> {
    fn count(&self) -> u64 {
        match self {
            Self::Text(_) => 1,
            Self::Ranges(ranges) => ranges.iter().fold(0, |sum, (first, last, _)| {
                sum.saturating_add((last - first).saturating_add(1))
            }),
        }
    }
}

fn parts(item: &str) -> Result<Vec<Part<'_>>, Fault> {
    let is_name = |letter: char| letter.is_ascii_alphanumeric() || "._-[],".contains(letter);
    let has_letter = item.contains(|letter: char| letter.is_ascii_alphabetic());
    if !has_letter || !item.chars().all(is_name) {
        return Err(Fault::Malformed);
    }
    let mut parts = Vec::new();
    let mut rest = item;
    while let Some((text, after)) = rest.split_once('[') {
        let (ranges, after) = after.split_once(']').ok_or(Fault::Malformed)?;
        parts.push(Part::Text(text));
        parts.push(Part::Ranges(
            ranges.split(',').map(range).collect::<Result<_, _>>()?,
        ));
        if parts.len() > 2 * PARTS_LIMIT {
            return Err(Fault::Malformed);
        }
        rest = after;
    }
    parts.push(Part::Text(rest));
    Ok(parts)
}

fn range(text: &str) -> Result<(u64, u64, usize), Fault> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let number = |text: &str| {
        let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        // Nineteen digits fit; a longer number alone is past any limit.
        match text.len() {
            _ if !is_number => Err(Fault::Malformed),
            0..=19 => text.parse().map_err(|_| Fault::Malformed),
            _ => Err(Fault::TooMany),
        }
    };
    let (low, high) = (number(first)?, number(last)?);
    if low > high {
        return Err(Fault::Malformed);
    }
    Ok((low, high, first.len()))
}

fn names(parts: &[Part]) -> Vec<String> {
    let mut names = vec![String::new()];
    for part in parts {
        names = match part {
            Part::Text(text) => names.into_iter().map(|name| name + text).collect(),
            Part::Ranges(ranges) => names
                .iter()
                .flat_map(|name| {
                    let numbers = ranges.iter().flat_map(|(first, last, digits)| {
                        (*first..=*last).map(move |number| format!("{number:0digits$}"))
                    });
                    numbers.map(move |number| format!("{name}{number}"))
                })
                .collect(),
        };
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_counted_before_they_are_made() {
        let check = |list: &str, names: &[&str]| assert_eq!(expand(list).unwrap(), names, "{list}");
        check("node030", &["node030"]);
        check("n[1-3]", &["n1", "n2", "n3"]);
        check("n[08-10,2]x", &["n08x", "n09x", "n10x", "n2x"]);
        check("r[1-2]n[1-2],login", &["r1n1", "r1n2", "r2n1", "r2n2", "login"]);
        for list in [
            "",
            "n[1-",
            "n[3-1]",
            "n]1[",
            "n[a-b]",
            "n[[1]]",
            "a,,b",
            "n[1-2-3]",
            "64",
            "0:4(S:0-1)",
        ] {
            assert_eq!(expand(list), Err(Fault::Malformed), "{list}");
        }
        for list in [
            "n[0-1099511627775]",
            "a[1-60000]b[1-60000]",
            "n[1-99999999999999999999]",
        ] {
            assert_eq!(expand(list), Err(Fault::TooMany), "{list}");
        }
    }
}
