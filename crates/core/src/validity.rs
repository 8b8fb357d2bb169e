//! How long a front end may use an answer without asking again.
//!
//! Each answer with attributes says how long three things may be believed: the name that led to the
//! file, the attributes, and the file's pages. Most file systems say nothing. Then the mount's mode
//! of consistency decides. A lease or a placement can decide it for each file.

use std::num::NonZeroU32;
use std::time::Duration;

/// How long something may be believed without asking again, in whole milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ttl(NonZeroU32); // one more than the milliseconds, so that an `Option` takes no more room

impl Ttl {
    /// Not at all: ask each time.
    pub const ZERO: Ttl = Ttl(NonZeroU32::MIN);
    /// Until the server says otherwise.
    pub const FOREVER: Ttl = Ttl(NonZeroU32::MAX);

    /// Rounded down. A time longer than 49 days is for ever.
    pub fn of(time: Duration) -> Ttl {
        let millis = u32::try_from(time.as_millis()).unwrap_or(u32::MAX);
        Ttl(NonZeroU32::MIN.saturating_add(millis))
    }

    /// What is left of it so much later. For ever stays for ever.
    pub fn after(self, time: Duration) -> Ttl {
        match self {
            Ttl::FOREVER => Ttl::FOREVER,
            _ => Ttl::of(self.duration().saturating_sub(time)),
        }
    }

    /// The time; ten years stand for ever.
    pub fn duration(self) -> Duration {
        match self {
            Ttl::FOREVER => Duration::from_secs(10 * 365 * 86_400),
            Ttl(number) => Duration::from_millis(u64::from(number.get() - 1)),
        }
    }

    /// A number for each of them, and 0 for none.
    pub fn to_number(ttl: Option<Ttl>) -> u32 {
        ttl.map_or(0, |Ttl(number)| number.get())
    }

    /// Back from [`Ttl::to_number`].
    pub fn from_number(number: u32) -> Option<Ttl> {
        NonZeroU32::new(number).map(Ttl)
    }
}

/// How long the pages of a file may be kept. No time: what keeps pages, such as the kernel's page
/// cache, has no clock for them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PageValidity {
    /// None are kept: each read and each write reaches the file system.
    Never,
    /// Until an open finds another version of the file, by its times and its size.
    UntilChanged,
    /// Until the file system says that others have changed the file
    /// ([`SessionControl::hear_changes_by`](crate::SessionControl::hear_changes_by)), or until an
    /// open says something else.
    UntilRevoked,
}

/// How long an answer may be believed. Where a part is none, the mount's mode of consistency
/// decides.
///
/// A front end may believe an answer for less time, not for more. A front end whose kernel does not
/// check permissions believes no names: the server has to see each component of a path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Validity {
    /// How long it may be believed that the name leads to this file. It says something only in an
    /// answer that a name led to.
    pub name: Option<Ttl>,
    /// The attributes.
    pub attributes: Option<Ttl>,
    /// The content, of regular files; the listing, of directories. It counts at an open.
    pub pages: Option<PageValidity>,
}

impl Validity {
    /// Nothing is said: as the mount's mode has it.
    pub const UNSAID: Validity = Validity { name: None, attributes: None, pages: None };

    /// What is left of it so much later.
    pub fn after(self, time: Duration) -> Validity {
        let after = |ttl: Option<Ttl>| ttl.map(|ttl| ttl.after(time));
        Validity { name: after(self.name), attributes: after(self.attributes), ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_rounded_down_and_end_with_for_ever() {
        let of = |micros| Ttl::of(Duration::from_micros(micros));
        assert_eq!((of(0), of(999)), (Ttl::ZERO, Ttl::ZERO));
        assert_eq!(of(1_500).duration(), Duration::from_millis(1));
        let last = Duration::from_millis(u64::from(u32::MAX) - 2);
        assert_eq!(Ttl::of(last).duration(), last);
        for long in [last + Duration::from_millis(1), last * 2, Duration::MAX] {
            assert_eq!(Ttl::of(long), Ttl::FOREVER);
        }
        assert!(Ttl::FOREVER.duration() > last && Ttl::FOREVER > Ttl::of(last));
        let second = Duration::from_secs(1);
        assert_eq!(Ttl::FOREVER.after(second), Ttl::FOREVER);
        assert_eq!(
            (Ttl::of(3 * second).after(second), Ttl::of(second).after(2 * second)),
            (Ttl::of(2 * second), Ttl::ZERO)
        );
    }

    #[test]
    fn each_time_has_its_number() {
        for ttl in
            [None, Some(Ttl::ZERO), Some(Ttl::of(Duration::from_secs(1))), Some(Ttl::FOREVER)]
        {
            assert_eq!(Ttl::from_number(Ttl::to_number(ttl)), ttl);
        }
        assert_eq!((Ttl::to_number(None), size_of::<Validity>()), (0, 12));
    }
}
