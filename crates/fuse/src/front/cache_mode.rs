//! How long the kernel may believe an answer. The answer says it. Where it says nothing, the
//! mount's mode of consistency decides. Nothing else in the front end looks at the mode for that.

use std::time::Duration;

use dray_core::{Attr, Error, PageValidity, Ttl, Validity};

use crate::options::{Consistency, Options};
use crate::proto::reply::KernelValidity;
use crate::state::published::NAME_VALIDITY_MAX;

/// What a mode of consistency has for answers that say nothing, and what it bounds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CacheMode {
    /// Of names and attributes.
    times: KernelValidity,
    /// Of the absence of names.
    absence: Duration,
    pages: PageValidity,
    names: Names,
}

/// What a mode makes of names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Names {
    /// Each is looked up each time it is used, whatever an answer says. The server checks
    /// permissions, and has to see each component of a path.
    Asked,
    /// Each is believed as long as its lease lasts, and `max` at most. The server breaks the lease before the
    /// name leads elsewhere, and the kernel checks permissions.
    Leased { max: Duration },
    /// Each is believed as long as the answer says, and may lead elsewhere at the server meanwhile.
    MayChange,
    /// Each is believed as long as the answer says, and leads where it led.
    Stay,
}

impl CacheMode {
    /// `names_expire`: the kernel can be notified that a name's time is over.
    pub(crate) fn of(options: &Options, names_expire: bool) -> CacheMode {
        let Options { attr_validity, entry_validity, negative_validity, .. } = *options;
        let (entry, attr, absence, pages, names) = match options.consistency {
            Consistency::Strict => {
                let none = Duration::ZERO;
                let names = match options.leases {
                    true if names_expire => Names::Leased { max: NAME_VALIDITY_MAX },
                    // Dropping a name would drop what is mounted behind it, too.
                    true => Names::Leased { max: Duration::ZERO },
                    false => Names::Asked,
                };
                (none, none, none, PageValidity::Never, names)
            }
            Consistency::CloseToOpen => (
                entry_validity,
                attr_validity,
                negative_validity,
                PageValidity::UntilChanged,
                Names::MayChange,
            ),
            Consistency::Immutable => {
                let forever = Ttl::FOREVER.duration();
                (forever, forever, forever, PageValidity::UntilRevoked, Names::Stay)
            }
        };
        CacheMode { times: KernelValidity { entry, attr }, absence, pages, names }
    }

    /// How long the kernel may believe a name that led to a file with these attributes.
    pub(crate) fn name(&self, attr: &Attr) -> Duration {
        match self.names {
            Names::Asked => Duration::ZERO,
            Names::Leased { max } => said(attr.validity.name, Duration::ZERO).min(max),
            Names::MayChange | Names::Stay => said(attr.validity.name, self.times.entry),
        }
    }

    /// How long it may believe the attributes.
    pub(crate) fn attributes(&self, attr: &Attr) -> Duration {
        said(attr.validity.attributes, self.times.attr)
    }

    /// How long it may believe an entry.
    pub(crate) fn entry(&self, attr: &Attr) -> KernelValidity {
        KernelValidity { entry: self.name(attr), attr: self.attributes(attr) }
    }

    /// How long it may believe that there is no such name, which a lookup has failed with.
    pub(crate) fn absence(&self, error: &Error) -> Duration {
        match self.names {
            Names::Asked => Duration::ZERO,
            Names::Leased { max } => said(error.absence(), Duration::ZERO).min(max),
            Names::MayChange | Names::Stay => said(error.absence(), self.absence),
        }
    }

    /// How long it may keep the pages of what was opened, if the opening said anything.
    pub(crate) fn pages(&self, validity: Option<Validity>) -> PageValidity {
        validity.and_then(|validity| validity.pages).unwrap_or(self.pages)
    }

    /// How long the answer to anything else about a file may be believed.
    pub(crate) fn unsaid(&self) -> Duration {
        self.times.attr
    }

    /// Whether the attributes of a file that is opened are wanted with it, to see whether its pages are
    /// those of another version.
    pub(crate) fn looks_at_open(&self) -> bool {
        self.pages == PageValidity::UntilChanged
    }

    /// Whether what is believed may be recalled.
    pub(crate) fn is_leased(&self) -> bool {
        matches!(self.names, Names::Leased { .. })
    }

    /// Whether the kernel may keep listings that may be recalled. Without names each file would be looked up.
    pub(crate) fn keeps_listings(&self) -> bool {
        matches!(self.names, Names::Leased { max } if !max.is_zero())
    }

    /// Whether the kernel goes by names that others may have changed.
    pub(crate) fn names_may_change(&self) -> bool {
        self.names == Names::MayChange
    }
}

fn said(ttl: Option<Ttl>, default: Duration) -> Duration {
    ttl.map_or(default, Ttl::duration)
}

#[cfg(test)]
mod tests {
    use dray_core::Errno;

    use super::*;

    fn mode(consistency: Consistency) -> CacheMode {
        let [attr_validity, entry_validity, negative_validity] = [1, 2, 3].map(Duration::from_secs);
        let times =
            Options { attr_validity, entry_validity, negative_validity, ..Options::default() };
        CacheMode::of(&Options { consistency, ..times }, true)
    }

    /// Seconds of a name, of attributes and of an absence, and pages.
    fn believed(
        mode: CacheMode,
        ttl: Option<Ttl>,
        pages: Option<PageValidity>,
    ) -> ([u64; 3], PageValidity) {
        let validity = Validity { name: ttl, attributes: ttl, pages };
        let attr = Attr { validity, ..Attr::default() };
        let absent = Error::new(Errno::ENOENT).absent_for(ttl);
        let times = [mode.name(&attr), mode.attributes(&attr), mode.absence(&absent)];
        (times.map(|time| time.as_secs()), mode.pages(Some(validity)))
    }

    #[test]
    fn where_nothing_is_said_the_mode_decides() {
        use PageValidity::*;
        let forever = [Ttl::FOREVER.duration().as_secs(); 3];
        for (consistency, times, pages) in [
            (Consistency::Strict, [0; 3], Never),
            (Consistency::CloseToOpen, [2, 1, 3], UntilChanged),
            (Consistency::Immutable, forever, UntilRevoked),
        ] {
            assert_eq!(believed(mode(consistency), None, None), (times, pages));
            assert_eq!(mode(consistency).pages(None), pages);
        }
    }

    /// A recall of a name waits for no longer than the kernel believes it.
    #[test]
    fn leased_names_are_believed_for_a_while_and_only_where_the_kernel_can_be_notified() {
        let options = Options { leases: true, ..Options::default() };
        let long = Some(Ttl::of(Duration::from_secs(5)));
        for (names_expire, names) in [(true, NAME_VALIDITY_MAX.as_secs()), (false, 0)] {
            let mode = CacheMode::of(&options, names_expire);
            assert!(mode.is_leased() && !mode.names_may_change());
            assert_eq!(believed(mode, long, None).0, [names, 5, names]);
            assert_eq!(believed(mode, None, None), ([0; 3], PageValidity::Never));
        }
    }

    #[test]
    fn what_is_said_holds_in_each_mode_but_for_names_that_the_server_must_see() {
        use PageValidity::*;
        let (long, none) = (Ttl::of(Duration::from_secs(60)), Ttl::ZERO);
        for (consistency, names) in
            [(Consistency::Strict, 0), (Consistency::CloseToOpen, 60), (Consistency::Immutable, 60)]
        {
            let mode = mode(consistency);
            for pages in [Never, UntilChanged, UntilRevoked] {
                let said = believed(mode, Some(long), Some(pages));
                assert_eq!(said, ([names, 60, names], pages));
                assert_eq!(believed(mode, Some(none), Some(pages)), ([0; 3], pages));
            }
        }
    }
}
