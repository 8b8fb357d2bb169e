//! The observers of an export. Its server asks them to admit a call before the call waits for
//! others. So others do not wait for one that is held up. How the call ended they see around the
//! file system.

use std::sync::Arc;
use std::time::Duration;

use dray_core::{
    Admit, CallAdmission, Context, Error, FileId, FileSystem, Grant, GrantedAdmit, ObservedCall,
    Result,
};

use crate::observe::{Observer, Outcome};
use crate::observed::{Observed, admitted};
use crate::qos::ProjectTable;

/// A file system with its observers, to be served.
pub struct ObservedExport {
    /// The file system to serve, which tells the observers how calls ended.
    pub fs: Arc<dyn FileSystem>,
    /// For the server to ask; none: no observer admits calls.
    pub admission: Option<Arc<dyn CallAdmission>>,
}

/// Puts `observers` around `fs`, which a server is to serve. They are asked in this order.
pub fn observe_export(
    fs: Arc<dyn FileSystem>,
    observers: Vec<Arc<dyn Observer>>,
) -> ObservedExport {
    observe_export_by_project(fs, observers, None)
}

/// The same, where the projects of files that are opened are noted in `projects`.
pub fn observe_export_by_project(
    fs: Arc<dyn FileSystem>,
    observers: Vec<Arc<dyn Observer>>,
    projects: Option<Arc<ProjectTable>>,
) -> ObservedExport {
    let admitting = observers.iter().filter(|one| one.admits()).cloned().collect();
    let counts_opens = observers.iter().any(|one| one.counts_opens());
    let all = Arc::new(Observers { admitting, all: observers, counts_opens, projects });
    let fs = match all.all.is_empty() && all.projects.is_none() {
        true => fs,
        false => Arc::new(Observed::new(fs, all.clone())),
    };
    let admits = !all.admitting.is_empty();
    ObservedExport { fs, admission: admits.then_some(all as Arc<dyn CallAdmission>) }
}

/// Several observers as one.
struct Observers {
    all: Vec<Arc<dyn Observer>>,
    /// The observers that may hold a call up.
    admitting: Vec<Arc<dyn Observer>>,
    /// Whether any of them wants to know what is moved through each open file.
    counts_opens: bool,
    projects: Option<Arc<ProjectTable>>,
}

impl Observer for Observers {
    fn admits(&self) -> bool {
        false
    }

    /// The server has asked.
    fn admit<'a>(&'a self, _: &'a Context, _: &'a ObservedCall<'a>) -> Admit<'a> {
        Admit::Now
    }

    fn counts_opens(&self) -> bool {
        self.counts_opens
    }

    fn projects(&self) -> Option<&ProjectTable> {
        self.projects.as_deref()
    }

    fn done(&self, cx: &Context, call: &ObservedCall<'_>, outcome: Outcome<'_>, elapsed: Duration) {
        self.all.iter().for_each(|one| one.done(cx, call, outcome, elapsed));
    }
}

impl CallAdmission for Observers {
    fn is_on(&self) -> bool {
        true // there is none where no observer admits
    }

    fn admit_at_once(&self, cx: &Context, call: &ObservedCall<'_>) -> Option<Grant> {
        self.admitting.iter().all(|one| one.lets_pass(cx, call)).then_some(Grant::NONE)
    }

    fn admit<'a>(&'a self, cx: &'a Context, call: &'a ObservedCall<'a>) -> GrantedAdmit<'a> {
        for (index, one) in self.admitting.iter().enumerate() {
            match one.admit(cx, call) {
                Admit::Now => {}
                Admit::Refuse(error) => return GrantedAdmit::Refuse(error),
                Admit::After(wait) => {
                    let rest = &self.admitting[index + 1..];
                    return GrantedAdmit::After(Box::pin(async move {
                        wait.await?;
                        admitted_by_all(rest, cx, call).await?;
                        Ok(Grant::NONE)
                    }));
                }
            }
        }
        GrantedAdmit::Now(Grant::NONE)
    }

    fn ended(&self, _: Grant) {}

    fn refused(&self, cx: &Context, call: &ObservedCall<'_>, error: &Error, elapsed: Duration) {
        let outcome = Outcome { error: Some(error), ..Outcome::default() };
        self.done(cx, call, outcome, elapsed);
    }

    fn settled(
        &self,
        cx: &Context,
        call: &ObservedCall<'_>,
        made: Option<FileId>,
        error: Option<&Error>,
    ) {
        let outcome = Outcome { id: made, error, ..Outcome::default() };
        self.all.iter().for_each(|one| one.settled(cx, call, outcome));
    }
}

async fn admitted_by_all(
    observers: &[Arc<dyn Observer>],
    cx: &Context,
    call: &ObservedCall<'_>,
) -> Result<()> {
    for one in observers {
        admitted(&**one, cx, call).await?;
    }
    Ok(())
}
