//! Starts the supervisor of a fresh mount: the mounting process becomes it.

use std::convert::Infallible;
use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use dray_client::{Key, SessionMemory, Target};
use dray_fuse::State;

use super::kept_key::KeptKey;
use super::mount_descriptors::MountDescriptors;
use crate::args::ServedArgs;
use crate::daemonize::ReadinessPipe;
use crate::error::{ErrorContext, Failure};
use crate::paths;
use crate::serve::export::split_commas;

/// The program that this process runs, whatever has become of its file.
pub const OWN_PROGRAM: &str = "/proc/self/exe";

/// A mount that is to be supervised.
pub struct Launch {
    /// The mounted descriptor.
    pub device: OwnedFd,
    /// The kernel's number of the connection.
    pub connection: u32,
    /// What outlives the daemons.
    pub memory: MountMemory,
    /// The arguments of the daemons.
    pub words: MountSettings,
}

/// Memory that a supervisor holds for its daemons.
pub struct MountMemory {
    /// Of `dray_fuse::State`.
    state: OwnedFd,
    /// Of the client's session.
    session: OwnedFd,
    /// Of the mount's key, if it has one.
    key: Option<OwnedFd>,
}

impl MountMemory {
    /// For a new mount. Errors: there is no room for it. It counts as files do: a limit on the size of
    /// files is one on it, too (memfd_create(2)).
    pub fn create(key: Option<&Key>) -> Result<MountMemory, Failure> {
        MountMemory::make(key).map_err(|error| {
            let advice = match error.raw_os_error() {
                Some(libc::EFBIG) => {
                    "; the memory of a mount counts as a file of 2.1 GiB: raise the limit on the size \
                     of files (`ulimit -Hf`, LimitFSIZE)"
                }
                Some(libc::ENOMEM) => {
                    "; a mount takes 2.1 GiB of address space: raise the limit on that (`ulimit -Hv`, \
                     LimitAS), if there is one"
                }
                _ => "",
            };
            Failure::new(format!("cannot make the memory of a mount: {error}{advice}"))
        })
    }

    fn make(key: Option<&Key>) -> io::Result<MountMemory> {
        let state = State::create()?.fd().try_clone_to_owned()?;
        let session = SessionMemory::create_memfd()?;
        let session = session.fd().map(|fd| fd.try_clone_to_owned());
        let session = session.unwrap_or_else(|| Err(io::ErrorKind::Other.into()))?;
        Ok(MountMemory { state, session, key: key.map(KeptKey::create).transpose()? })
    }
}

/// The arguments of a mount's processes.
pub struct MountSettings {
    /// What is mounted.
    pub target: Target,
    /// Where.
    pub at: PathBuf,
    /// `-o`, as given.
    pub options: Vec<String>,
    /// Threads, and clones of the device.
    pub workers: usize,
    /// Stays in the foreground.
    pub foreground: bool,
}

impl Launch {
    /// Turns this process into the supervisor. Returns only if that cannot be.
    pub fn exec(self, waiting: ReadinessPipe) -> Result<Infallible, Failure> {
        let what = || "cannot start the supervisor".to_owned();
        let MountMemory { state, session, key } = self.memory;
        let clone = |_| dray_fuse::clone_device(self.device.as_fd());
        let clones = (0..self.words.workers).map(clone).collect::<io::Result<_>>().doing(what)?;
        let served = ServedArgs {
            target: self.words.target,
            mountpoint: self.words.at,
            options: self.words.options.iter().map(|list| lasting(list)).collect(),
            clones: self.words.workers,
            foreground: self.words.foreground,
        };
        let held = MountDescriptors { device: self.device, state, session, clones, key };
        held.place(waiting.into_fd()).doing(what)?;
        let mut command = Command::new(OWN_PROGRAM);
        command.arg0("dray").arg("mount-supervisor").args(served.words());
        command.arg("--connection").arg(self.connection.to_string());
        command.arg("--program").arg(program_as_called());
        command.arg("--run-dir").arg(paths::run_dir());
        // Verbosity is inherited, too.
        command.env("DRAY_LOG", log::max_level().as_str());
        Err(command.exec()).doing(what)
    }
}

impl ServedArgs {
    /// As words of a command line.
    pub fn words(&self) -> Vec<OsString> {
        let mut words: Vec<OsString> =
            vec!["--clones".into(), self.clones.to_string().into(), self.target.to_string().into()];
        words.push(self.mountpoint.clone().into());
        let options = self.options.iter().filter(|list| !list.is_empty());
        words.extend(options.map(|list| format!("-o{list}").into()));
        if self.foreground {
            words.push("--foreground".into());
        }
        words
    }
}

/// Options that mean the same in another working directory.
fn lasting(list: &str) -> String {
    let absolute = |option: String| match option.strip_prefix("auth=psk:") {
        Some(file) => match std::path::absolute(file) {
            Ok(file) => format!("auth=psk:{}", file.display()),
            Err(_) => option,
        },
        None => option,
    };
    let escaped = |option: String| option.replace('\\', "\\\\").replace(',', "\\,");
    let options = split_commas(list).into_iter().map(|option| escaped(absolute(option)));
    options.collect::<Vec<_>>().join(",")
}

/// The file by whose name this program was called, links not followed. So a package or a link that
/// is changed leads to the new program.
fn program_as_called() -> PathBuf {
    let own = || std::env::current_exe().unwrap_or_else(|_| OWN_PROGRAM.into());
    let Some(called) = std::env::args_os().next().map(PathBuf::from) else { return own() };
    if called.components().count() > 1 || called.is_absolute() {
        return std::path::absolute(&called).unwrap_or_else(|_| own());
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).map(|dir| dir.join(&called));
    found.into_iter().find(|file| is_program(file)).unwrap_or_else(own)
}

fn is_program(file: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    std::fs::metadata(file)
        .is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_come_through_the_command_line() {
        use clap::Parser;
        let served = ServedArgs {
            target: "dray+unix:///a b?export=x".parse().unwrap(),
            mountpoint: "/mnt/a b".into(),
            options: vec!["ro,timeout=3".into(), String::new(), "auth=psk:/a\\,b".into()],
            clones: 3,
            foreground: true,
        };
        let mut line: Vec<OsString> = vec!["dray".into(), "mount-daemon".into()];
        line.extend(served.words());
        // As other versions write and read it: a supervisor outlives upgrades.
        let words = ["--clones", "3", "dray+unix:///a b?export=x", "/mnt/a b", "-oro,timeout=3"];
        let options = ["-oauth=psk:/a\\,b", "--foreground"];
        assert_eq!(line[2..], [&words[..], &options].concat());
        let args = crate::args::Args::try_parse_from(&line).unwrap();
        let crate::args::Command::MountDaemon(args) = args.command else { panic!("no daemon") };
        assert_eq!(args.mount.target, served.target);
        assert_eq!(args.mount.mountpoint, served.mountpoint);
        assert_eq!(args.mount.options, ["ro,timeout=3", "auth=psk:/a\\,b"]);
        assert!(args.mount.foreground && args.mount.clones == 3 && !args.successor);
        line.push("--successor".into());
        let args = crate::args::Args::try_parse_from(&line).unwrap();
        let crate::args::Command::MountDaemon(args) = args.command else { panic!("no daemon") };
        assert!(args.successor);
    }

    #[test]
    fn a_key_is_found_from_any_directory() {
        let here = std::env::current_dir().unwrap();
        let list = lasting("ro,auth=psk:key\\,s,timeout=1");
        assert_eq!(list, format!("ro,auth=psk:{}/key\\,s,timeout=1", here.display()));
    }

    #[test]
    fn this_program_has_a_name() {
        assert!(is_program(&program_as_called()));
    }
}
