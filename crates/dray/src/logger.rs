//! Log lines: to stderr, or to syslog once a daemon has left its terminal.

use std::io::{self, ErrorKind, Write};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};

use log::{Level, LevelFilter, Log, Metadata, Record};

static LOGGER: Logger = Logger { style: OnceLock::new(), syslog: OnceLock::new() };

struct Logger {
    style: OnceLock<Style>,
    /// Where lines go after [`to_syslog`].
    syslog: OnceLock<Syslog>,
}

/// The way to the listener of a socket. It outlives the listener: one that is started anew, as by an
/// upgrade, is found again.
struct Syslog {
    at: PathBuf,
    socket: Mutex<Option<UnixDatagram>>,
}

impl Syslog {
    fn new(at: &Path) -> Syslog {
        Syslog { at: at.to_owned(), socket: Mutex::default() }
    }

    /// A line that cannot be sent is lost: nobody waits for a log.
    fn send(&self, line: &str) {
        let mut socket = self.socket.lock().unwrap_or_else(PoisonError::into_inner);
        for _ in 0..2 {
            if socket.is_none() {
                *socket = self.connect().ok();
            }
            match socket.as_ref().map(|socket| socket.send(line.as_bytes())) {
                Some(Err(error)) if error.kind() != ErrorKind::WouldBlock => *socket = None,
                _ => return,
            }
        }
    }

    fn connect(&self) -> io::Result<UnixDatagram> {
        let socket = UnixDatagram::unbound()?;
        socket.connect(&self.at)?;
        socket.set_nonblocking(true)?;
        Ok(socket)
    }
}

/// How lines on stderr look.
#[derive(Clone, Copy)]
enum Style {
    /// For people.
    Plain,
    /// With the priority that the journal of systemd reads.
    Journal,
}

/// Begins logging: warnings and worse, more with each `verbose`, errors only if `quiet`;
/// `DRAY_LOG` (error, warn, info, debug, trace) has precedence.
pub fn start(verbose: u8, quiet: bool) {
    let journal = std::env::var_os("JOURNAL_STREAM").is_some();
    let _ = LOGGER.style.set(if journal { Style::Journal } else { Style::Plain }); // first wins
    let chosen = match (quiet, verbose) {
        (true, _) => LevelFilter::Error,
        (_, 0) => LevelFilter::Warn,
        (_, 1) => LevelFilter::Info,
        (_, 2) => LevelFilter::Debug,
        _ => LevelFilter::Trace,
    };
    let wish = std::env::var("DRAY_LOG").ok().filter(|name| !name.is_empty());
    let named = wish.as_deref().and_then(|name| name.parse().ok());
    if log::set_logger(&LOGGER).is_ok() {
        log::set_max_level(named.unwrap_or(chosen));
    }
    if let (Some(wish), None) = (wish, named) {
        log::warn!("DRAY_LOG=`{wish}` is none of error, warn, info, debug, trace: ignored");
    }
}

/// From here on lines go to syslog: stderr is about to be closed.
pub fn to_syslog() {
    to_syslog_at(Path::new("/dev/log"));
}

fn to_syslog_at(path: &Path) {
    let first = LOGGER.syslog.set(Syslog::new(path)).is_ok();
    if first {
        log_panics();
    }
}

/// A fault in dray is logged before the process ends by it: what the standard library says
/// of it goes to stderr alone.
fn log_panics() {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        let thread = std::thread::current();
        let (name, payload) = (thread.name().unwrap_or("without a name"), panic.payload());
        let words = payload.downcast_ref::<&str>().copied();
        let words = words.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
        let place = panic.location().map(ToString::to_string).unwrap_or_default();
        let words = words.unwrap_or("without words");
        log::error!("a fault in dray, please report it: thread {name}, {place}: {words}");
        usual(panic);
    }));
}

/// Priority of syslog(3): facility daemon for syslog, none for the journal.
fn priority(level: Level) -> u8 {
    match level {
        Level::Error => 3,
        Level::Warn => 4,
        Level::Info => 6,
        Level::Debug | Level::Trace => 7,
    }
}

const FACILITY_DAEMON: u8 = 3 << 3;

impl Log for Logger {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.level() <= log::max_level()
    }

    fn log(&self, record: &Record<'_>) {
        if !self.enabled(record.metadata()) {
            return;
        }
        let level = record.level();
        let text = crate::output::plain(&record.args().to_string());
        // A log that cannot be written is no reason to fail.
        if let Some(syslog) = self.syslog.get() {
            let priority = FACILITY_DAEMON | priority(level);
            let line = format!("<{priority}>dray[{}]: {text}", std::process::id());
            return syslog.send(&line);
        }
        let line = match self.style.get() {
            Some(Style::Journal) => format!("<{}>{text}\n", priority(level)),
            _ => format!("dray: {}: {text}\n", level.as_str().to_lowercase()),
        };
        let _ = std::io::stderr().write_all(line.as_bytes());
    }

    fn flush(&self) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A mount lives for months. After the first restart of syslog nothing of it was logged.
    #[test]
    fn a_syslog_that_is_started_anew_is_found_again() {
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path().join("log");
        let syslog = Syslog::new(&at);
        syslog.send("nobody is there");
        for line in ["first", "second", "third"] {
            let listener = UnixDatagram::bind(&at).unwrap();
            listener.set_nonblocking(true).unwrap();
            for _ in 0..2 {
                syslog.send(line);
                let mut heard = [0; 64];
                let len = listener.recv(&mut heard).unwrap();
                assert_eq!(&heard[..len], line.as_bytes());
            }
            std::fs::remove_file(&at).unwrap();
        }
    }

    /// Of a mount in the background only the number of the signal that had ended it was reported.
    #[test]
    fn a_fault_in_the_background_is_logged_to_syslog() {
        const AT: &str = "DRAY_TEST_SYSLOG";
        if let Some(at) = std::env::var_os(AT) {
            // The process that is started below: hooks and loggers are a whole process's.
            log::set_logger(&LOGGER).unwrap();
            log::set_max_level(LevelFilter::Warn);
            to_syslog_at(Path::new(&at));
            panic!("all {} are gone", 7);
        }
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path().join("log");
        let listener = UnixDatagram::bind(&at).unwrap();
        listener.set_read_timeout(Some(std::time::Duration::from_secs(60))).unwrap();
        let mut child = std::process::Command::new(std::env::current_exe().unwrap());
        let test = "logger::tests::a_fault_in_the_background_is_logged_to_syslog";
        let output = child.args(["--exact", test]).env(AT, &at).output().unwrap();
        assert!(!output.status.success());
        let mut heard = [0; 1024];
        let len = listener.recv(&mut heard).unwrap();
        let heard = String::from_utf8_lossy(&heard[..len]).into_owned();
        assert!(heard.contains("logger.rs:") && heard.contains("all 7 are gone"), "{heard}");
    }
}
