//! How people and drivers spell the same type, and which names are near one that is unknown.

/// The own name and the aliases.
pub(super) fn all<'a>(name: &'a str, aliases: &'a [String]) -> impl Iterator<Item = &'a str> {
    std::iter::once(name).chain(aliases.iter().map(String::as_str))
}

/// `NVIDIA H100 80GB HBM3` and `h100-80gb-hbm3` are one name.
fn normal(name: &str) -> String {
    let spelled: Vec<String> = name
        .split(|letter: char| letter.is_whitespace() || letter == '-' || letter == '_')
        .filter(|word| !word.is_empty())
        .map(str::to_lowercase)
        .collect();
    let words = match spelled.split_first() {
        Some((maker, rest)) if !rest.is_empty() && ["nvidia", "amd", "intel"].contains(&maker.as_str()) => {
            rest
        }
        _ => &spelled[..],
    };
    words.join("-")
}

pub(super) fn same(own: &str, asked: &str) -> bool {
    normal(own) == normal(asked)
}

/// Names that start or contain what was asked, then those that differ by few letters, at most eight;
/// every name where none is like it.
pub(super) fn near<'a>(asked: &str, names: impl Iterator<Item = &'a str>) -> String {
    // Distances are quadratic in the length, and no name is longer than this.
    let asked: String = normal(asked).chars().take(64).collect();
    let names: Vec<&str> = names.collect();
    let distance = |name: &str| {
        if !asked.is_empty() && name.contains(&asked) {
            0
        } else {
            strsim::damerau_levenshtein(&asked, name)
        }
    };
    let mut ranked: Vec<(usize, &str)> = names.iter().map(|name| (distance(name), *name)).collect();
    ranked.sort_unstable();
    ranked.retain(|(distance, name)| *distance <= name.len() / 3);
    ranked.truncate(8);
    let listed: Vec<&str> = if ranked.is_empty() {
        names
    } else {
        ranked.into_iter().map(|(_, name)| name).collect()
    };
    listed.join(", ")
}
