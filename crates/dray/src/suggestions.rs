//! Finds the known word that is nearest to an unknown one.

/// What is called so in one place, and so in another: as an option, and as a key of the file.
const SAME: [(&str, &str); 3] = [("ro", "read_only"), ("read_only", "ro"), ("readonly", "ro")];
/// So many letters of a longer word stand for it.
const BEGINNING_MIN: usize = 3;

/// The known word nearest to `word`, if it is near. Near is another name for it, or one that
/// differs in a third of the letters of the longer one at most. So is one with the same two
/// letters, and the only or shortest one that begins so. Of a word of two or three letters one that
/// differs in two is no match.
pub fn nearest<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let known: Vec<&str> = known.into_iter().collect();
    let same = |other: &&str| SAME.contains(&(word, *other));
    if let Some(other) = known.iter().copied().find(same) {
        return Some(other);
    }
    let letters = word.chars().count();
    let lower = word.to_lowercase();
    let near = |candidate: &&'a str| {
        let candidate_lower = candidate.to_lowercase();
        let apart = distance(&lower, &candidate_lower);
        let longer = letters.max(candidate.chars().count());
        let swapped = letters == 2 && lower.chars().rev().eq(candidate_lower.chars());
        (apart * 3 <= longer || swapped).then_some((apart, *candidate))
    };
    if let Some((_, near)) = known.iter().filter_map(near).min_by_key(|(apart, _)| *apart) {
        return Some(near);
    }
    let begins_so = |candidate: &&str| letters >= BEGINNING_MIN && candidate.starts_with(&lower);
    known.into_iter().filter(begins_so).min_by_key(|candidate| candidate.len())
}

/// "; did you mean `x`?", or what there is where nothing is near.
pub fn hint<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> String {
    let known: Vec<&str> = known.into_iter().collect();
    match meant(word, known.iter().copied()) {
        meant if meant.is_empty() => format!("; there are: {}", known.join(", ")),
        meant => meant,
    }
}

/// The same where it has been said what there is.
pub fn meant<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> String {
    nearest(word, known).map_or(String::new(), |near| format!("; did you mean `{near}`?"))
}

/// Levenshtein's distance, two neighbours that changed places counted as one change.
fn distance(left: &str, right: &str) -> usize {
    let (left, right): (Vec<char>, Vec<char>) = (left.chars().collect(), right.chars().collect());
    let mut before: Vec<usize> = Vec::new();
    let mut last: Vec<usize> = (0..=right.len()).collect();
    for i in 1..=left.len() {
        let mut row = vec![i];
        for j in 1..=right.len() {
            let change = usize::from(left[i - 1] != right[j - 1]);
            let mut best = (last[j - 1] + change).min(last[j] + 1).min(row[j - 1] + 1);
            let swapped =
                i > 1 && j > 1 && left[i - 1] == right[j - 2] && left[i - 2] == right[j - 1];
            if swapped {
                best = best.min(before[j - 2] + 1);
            }
            row.push(best);
        }
        before = std::mem::replace(&mut last, row);
    }
    last[right.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slips_are_recognised_and_other_words_are_not() {
        let known = ["timeout", "consistency", "transport", "ro"];
        assert_eq!(nearest("timeuot", known), Some("timeout"));
        assert_eq!(nearest("consistancy", known), Some("consistency"));
        assert_eq!(nearest("tranport", known), Some("transport"));
        assert_eq!(nearest("zzzzzz", known), None);
        // Of two letters both would have to change.
        assert_eq!((nearest("bg", known), nearest("or", known)), (None, Some("ro")));
        assert_eq!((nearest("cto", known), nearest("no", known)), (None, None));
        assert_eq!(
            (nearest("ro=", known), nearest("noac", ["noexec", "nodev"])),
            (Some("ro"), None)
        );
        assert_eq!(nearest("", known), None);
        assert_eq!(hint("zzzzzz", known), "; there are: timeout, consistency, transport, ro");
        assert_eq!(meant("zzzzzz", known), "");
        assert_eq!(hint("time_out", known), "; did you mean `timeout`?");
        assert_eq!(distance("ab", "ba"), 1);
        assert_eq!(distance("", "abc"), 3);
    }

    /// All that there is was listed instead.
    #[test]
    fn capitals_beginnings_and_other_names_are_recognised() {
        let keys = ["listen", "buffers_mib", "clients_max", "clients_of_one_address_max"];
        assert_eq!(nearest("LISTEN", keys), Some("listen"));
        assert_eq!(nearest("buffers", keys), Some("buffers_mib"));
        assert_eq!(nearest("clients", keys), Some("clients_max"));
        assert_eq!(nearest("cl", keys), None);
        assert_eq!(nearest("ro", ["name", "read_only"]), Some("read_only"));
        assert_eq!(nearest("read_only", ["rw", "ro"]), Some("ro"));
        assert_eq!(nearest("enospc", ["EIO", "ENOSPC"]), Some("ENOSPC"));
    }
}
