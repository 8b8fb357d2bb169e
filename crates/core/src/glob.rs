//! Patterns of names and paths in rules.

/// Whether `text` is what `pattern` means: `*` stands for any bytes, slashes too, and `?` for one byte. Time:
/// the product of their lengths at most.
pub fn glob_matches(pattern: &[u8], text: &[u8]) -> bool {
    let (mut p, mut t, mut star) = (0, 0, None);
    while t < text.len() {
        match pattern.get(p) {
            Some(b'*') => {
                star = Some((p, t));
                p += 1;
            }
            Some(byte) if *byte == b'?' || *byte == text[t] => (p, t) = (p + 1, t + 1),
            _ => match star {
                Some((at, from)) => {
                    star = Some((at, from + 1));
                    (p, t) = (at + 1, from + 1);
                }
                None => return false,
            },
        }
    }
    pattern[p..].iter().all(|byte| *byte == b'*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stars_stand_for_anything() {
        let matches = |pattern: &str, text: &str| glob_matches(pattern.as_bytes(), text.as_bytes());
        assert!(matches("", "") && matches("*", "") && matches("a?c", "abc") && matches("**", "a"));
        assert!(matches("/data/*.h5", "/data/run/7.h5") && matches("a*b*c", "aXbYbZc"));
        assert!(!matches("a", "") && !matches("?", "") && !matches("a*b", "aXc"));
        assert!(!matches("/data/*", "/home/data/x"));
    }
}
