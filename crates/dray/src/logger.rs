//! Log lines: to stderr, or to syslog once a daemon has left its terminal.

use std::io::Write;
use std::os::unix::net::UnixDatagram;
use std::sync::OnceLock;

use log::{Level, LevelFilter, Log, Metadata, Record};

static LOGGER: Logger = Logger { style: OnceLock::new(), syslog: OnceLock::new() };

struct Logger {
    style: OnceLock<Style>,
    /// Where lines go after [`to_syslog`]; none if nobody listens.
    syslog: OnceLock<Option<UnixDatagram>>,
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
    let named = std::env::var("DRAY_LOG").ok().and_then(|name| name.parse().ok());
    if log::set_logger(&LOGGER).is_ok() {
        log::set_max_level(named.unwrap_or(chosen));
    }
}

/// From here on lines go to syslog: stderr is about to be closed.
pub fn to_syslog() {
    let socket = UnixDatagram::unbound()
        .and_then(|socket| socket.connect("/dev/log").map(|()| socket))
        .and_then(|socket| socket.set_nonblocking(true).map(|()| socket));
    let _ = LOGGER.syslog.set(socket.ok()); // first wins
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
            let _ = syslog.as_ref().map(|socket| socket.send(line.as_bytes()));
            return;
        }
        let line = match self.style.get() {
            Some(Style::Journal) => format!("<{}>{text}\n", priority(level)),
            _ => format!("dray: {}: {text}\n", level.as_str().to_lowercase()),
        };
        let _ = std::io::stderr().write_all(line.as_bytes());
    }

    fn flush(&self) {}
}
