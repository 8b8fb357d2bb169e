//! `dray audit`.

pub(crate) mod access;
mod consumers;
pub(crate) mod feed;
mod follow;
pub(crate) mod local;
pub(crate) mod merge;
pub(crate) mod place;
mod remote;
pub(crate) mod render;
mod search;
pub(crate) mod sources;
pub(crate) mod time;
mod verify;
pub(crate) mod wire;

use dray_layers::audit::{AuditFilter, KindSet};

use crate::args::{AuditArgs, AuditCommand, FilterArgs};
use crate::error::Failure;

/// Does what is asked for.
pub fn run(args: &AuditArgs) -> Result<(), Failure> {
    match &args.command {
        AuditCommand::Register(args) => consumers::register(args),
        AuditCommand::Deregister(args) => consumers::deregister(args),
        AuditCommand::List(args) => consumers::list(args),
        AuditCommand::Clear(args) => consumers::clear(args),
        AuditCommand::Follow(args) => follow::run(args),
        AuditCommand::Search(args) => search::run(args),
        AuditCommand::Verify(args) => verify::run(args),
        AuditCommand::Stat(args) => verify::stat(args),
    }
}

/// What the arguments ask for. Errors: a kind or a user that is not known.
fn filter_of(args: &FilterArgs) -> Result<AuditFilter, Failure> {
    let kinds = match args.kinds.is_empty() {
        true => None,
        false => {
            let names = args.kinds.iter().map(String::as_str);
            Some(KindSet::of_names(names).map_err(|unknown| Failure::usage(unknown.to_string()))?)
        }
    };
    // To ask for `denied` alone means that.
    let denied = kinds == Some(KindSet::NONE);
    let uid = args.user.as_deref().map(uid_of).transpose()?;
    let path = args.path.as_ref().map(|path| path.clone().into_bytes());
    if path.as_ref().is_some_and(|path| !path.starts_with(b"/")) {
        return Err(Failure::usage("a path begins with a slash, at the root of the export"));
    }
    Ok(AuditFilter { kinds, uid, job: args.job.clone(), path, denied, ..AuditFilter::default() })
}

/// A user, by number or by the name that this machine knows.
pub(crate) fn uid_of(user: &str) -> Result<u32, Failure> {
    if let Ok(uid) = user.parse() {
        return Ok(uid);
    }
    let name = std::ffi::CString::new(user);
    // SAFETY: the name ends with a NUL; no other thread of this command asks for users, and what it
    // points to is read at once.
    let uid = name.ok().and_then(|name| unsafe {
        let found = libc::getpwnam(name.as_ptr());
        (!found.is_null()).then(|| (*found).pw_uid)
    });
    uid.ok_or_else(|| {
        Failure::usage(format!("this machine knows no user `{user}`: give the number"))
    })
}
