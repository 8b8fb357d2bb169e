//! Times as people write and read them, in UTC.

use crate::error::Failure;

const DAY_S: i64 = 86_400;

/// Days since 1970 of a day of the Gregorian calendar (`days_from_civil` of Howard Hinnant's
/// "chrono-Compatible Low-Level Date Algorithms").
fn days_of(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let era = year.div_euclid(400);
    let of_era = year.rem_euclid(400);
    let of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    era * 146_097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year - 719_468
}

/// Year, month and day (`civil_from_days`, as above).
fn date_of(days: i64) -> (i64, i64, i64) {
    let days = days + 719_468;
    let (era, of_era) = (days.div_euclid(146_097), days.rem_euclid(146_097));
    let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let shifted = (5 * of_year + 2) / 153;
    let (day, month) = (of_year - (153 * shifted + 2) / 5 + 1, (shifted + 2) % 12 + 1);
    (year + era * 400 + i64::from(month <= 2), month, day)
}

/// `2026-11-27T19:30:00.000123Z` (RFC 3339).
pub fn shown(time_us: u64) -> String {
    let (seconds, micros) = ((time_us / 1_000_000) as i64, time_us % 1_000_000);
    let (year, month, day) = date_of(seconds.div_euclid(DAY_S));
    let of_day = seconds.rem_euclid(DAY_S);
    let (hour, minute, second) = (of_day / 3600, of_day / 60 % 60, of_day % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{micros:06}Z")
}

/// A length of time: seconds, or a number with `s`, `m`, `h` or `d`.
pub fn parse_length(text: &str) -> Option<u64> {
    let (digits, factor) = match text.as_bytes().last()? {
        b's' => (&text[..text.len() - 1], 1),
        b'm' => (&text[..text.len() - 1], 60),
        b'h' => (&text[..text.len() - 1], 3600),
        b'd' => (&text[..text.len() - 1], 86_400),
        _ => (text, 1),
    };
    digits.parse::<u64>().ok()?.checked_mul(factor)
}

/// A moment, microseconds since 1970. `now_us` is what `2h` is before.
pub fn parse(text: &str, now_us: u64) -> Result<u64, Failure> {
    let wrong = || {
        Failure::usage(format!(
            "`{text}` is no time: say 2026-11-27, 2026-11-27T19:30:00, seconds since 1970, or 2h for two \
             hours ago"
        ))
    };
    if let Ok(seconds) = text.parse::<u64>() {
        return seconds.checked_mul(1_000_000).ok_or_else(wrong);
    }
    if let Some(length) = parse_length(text) {
        return Ok(now_us.saturating_sub(length.saturating_mul(1_000_000)));
    }
    let text_of_time = text.strip_suffix('Z').unwrap_or(text);
    let (date, clock) = text_of_time.split_once(['T', ' ']).unwrap_or((text_of_time, "0:0:0"));
    let numbers = |text: &str, by: char| -> Option<Vec<i64>> {
        text.split(by).map(|part| part.parse().ok()).collect()
    };
    let date = numbers(date, '-').ok_or_else(wrong)?;
    let clock = numbers(clock, ':').ok_or_else(wrong)?;
    let (&[year, month, day], [hour, minute, rest @ ..]) = (&date[..], &clock[..]) else {
        return Err(wrong());
    };
    let second = rest.first().copied().unwrap_or(0);
    let is_sound = (1970..=9999).contains(&year)
        && (1..=12).contains(&month)
        && (1..=31).contains(&day)
        && (0..24).contains(hour)
        && (0..60).contains(minute)
        && (0..61).contains(&second)
        && rest.len() < 2;
    if !is_sound {
        return Err(wrong());
    }
    let seconds = days_of(year, month, day) * DAY_S + hour * 3600 + minute * 60 + second;
    Ok(seconds as u64 * 1_000_000)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_and_shown() {
        for (text, seconds) in [
            ("1970-01-01", 0),
            ("2000-03-01", 951_868_800),
            ("2024-02-29T12:00", 1_709_208_000),
            ("2026-11-27T19:30:05Z", 1_795_807_805),
            ("17", 17),
            ("2h", 100_000 - 7200),
        ] {
            assert_eq!(parse(text, 100_000_000_000).unwrap(), seconds * 1_000_000, "{text}");
        }
        assert_eq!(shown(1_709_208_000_000_123), "2024-02-29T12:00:00.000123Z");
        assert_eq!(shown(0), "1970-01-01T00:00:00.000000Z");
        for text in ["", "soon", "2026-13-01", "2026-11", "2026-11-27T25:00", "1h2m"] {
            assert!(parse(text, 0).is_err(), "{text}");
        }
        assert_eq!((parse_length("7d"), parse_length("90")), (Some(604_800), Some(90)));
    }
}
