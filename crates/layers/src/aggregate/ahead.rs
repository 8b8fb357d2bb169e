//! Data that were read ahead: windows of a file.

use std::sync::Arc;
use std::time::Duration;

use dray_core::{Buf, BufMut, Context, OpenFile, Reservation};
use dray_rt::Instant;

use super::core::later;
use super::figures::{add, take};
use super::file_state::{AggregatedFileState, Parts, is_older};
use super::streams::{ReadPattern, Reader};
use super::{AGE_MAX, BLOCK_BYTES};

/// Reads of a stream after which the next window is read before it is asked for.
const AHEAD_FROM_RUN: u32 = 4;

/// Pieces at equal distances that are read before they are asked for.
const STRIDES_AHEAD: u64 = 4;

/// Larger reads gain nothing.
pub(super) const READ_MAX_BYTES: usize = BLOCK_BYTES / 2;

/// A part of a file that was read ahead, or is being read.
pub(super) struct ReadAheadWindow {
    serial: u64,
    at: u64,
    len_bytes: usize,
    /// Less than `len_bytes` at the end of the file. None: it is being read.
    data: Option<Buf>,
    begun: Instant,
    /// The last byte of the window has been asked for: mostly nobody wants the rest again.
    is_read: bool,
    _place: Reservation,
}

impl ReadAheadWindow {
    fn end(&self) -> u64 {
        self.at.saturating_add(self.len_bytes as u64)
    }

    fn overlaps(&self, (start, end): (u64, u64)) -> bool {
        self.at < end && start < self.end()
    }
}

/// A window to be read.
struct Fetch {
    serial: u64,
    at: u64,
    len_bytes: usize,
}

/// Where the bytes of a read are.
enum WindowLookup {
    Here(Buf),
    /// The bytes are being read.
    Coming,
    /// The file has ended before these bytes.
    Below,
    Nowhere,
}

/// One read of a client.
pub(super) struct ClientRead<'a> {
    pub(super) cx: &'a Context,
    pub(super) file: &'a Arc<dyn OpenFile>,
    pub(super) reader: Reader,
    pub(super) at: u64,
    pub(super) len_bytes: usize,
}

impl ClientRead<'_> {
    fn end(&self) -> u64 {
        self.at.saturating_add(self.len_bytes as u64)
    }
}

impl AggregatedFileState {
    /// The bytes of a read, if it is part of a stream that is read ahead. They are never fewer than
    /// wanted: the file system below is asked where the file ends.
    pub(super) async fn read_ahead(self: &Arc<Self>, wanted: &ClientRead<'_>) -> Option<Buf> {
        let pattern = self.parts().streams.note(wanted.reader, wanted.at, wanted.len_bytes as u64);
        if pattern == ReadPattern::None {
            return None;
        }
        match self.find(wanted) {
            WindowLookup::Here(data) => {
                self.go_on_ahead(wanted, pattern);
                return Some(data);
            }
            WindowLookup::Coming => self.wait_for(wanted).await,
            WindowLookup::Below => return None,
            WindowLookup::Nowhere => match self.begin_fetch(wanted, pattern) {
                Some(fetch) => {
                    // The reader waits for this one.
                    let cx = Context { class: wanted.cx.class, ..later(wanted.cx) };
                    self.fetch(wanted.file, &cx, fetch).await;
                }
                None => return None,
            },
        }
        // The window can have been forgotten meanwhile. Then the file system below is asked.
        let WindowLookup::Here(data) = self.find(wanted) else { return None };
        self.go_on_ahead(wanted, pattern);
        Some(data)
    }

    fn find(&self, wanted: &ClientRead<'_>) -> WindowLookup {
        let mut parts = self.parts();
        let whole =
            |window: &&mut ReadAheadWindow| window.at <= wanted.at && wanted.end() <= window.end();
        let Some(window) = parts.windows.iter_mut().find(whole) else {
            return WindowLookup::Nowhere;
        };
        let Some(data) = &window.data else { return WindowLookup::Coming };
        let start = (wanted.at - window.at) as usize;
        if is_older(window.begun, AGE_MAX) {
            return WindowLookup::Nowhere;
        }
        window.is_read |= start + wanted.len_bytes == data.len();
        match start + wanted.len_bytes <= data.len() {
            true => WindowLookup::Here(data.slice(start..start + wanted.len_bytes)),
            false => WindowLookup::Below,
        }
    }

    async fn wait_for(&self, wanted: &ClientRead<'_>) {
        let coming = |window: &ReadAheadWindow| {
            window.data.is_none() && window.at <= wanted.at && wanted.end() <= window.end()
        };
        self.wait_until(|parts| !parts.windows.iter().any(coming)).await;
    }

    /// A window for a read that finds none. None: it gains nothing, or there is no memory.
    fn begin_fetch(
        self: &Arc<Self>,
        wanted: &ClientRead<'_>,
        pattern: ReadPattern,
    ) -> Option<Fetch> {
        match pattern {
            ReadPattern::Sequential { .. } => {
                let len_bytes = to_boundary(wanted.at, wanted.len_bytes);
                self.begin_window(wanted.cx, wanted.at, len_bytes, true)
            }
            // The piece itself is asked for as it is.
            ReadPattern::Strided { .. } => {
                self.go_on_ahead(wanted, pattern);
                None
            }
            ReadPattern::None => None,
        }
    }

    /// Adds a window that is being read. If the client has its share it takes the place of one that has
    /// been read; an `eager` one takes that of any.
    fn begin_window(
        self: &Arc<Self>,
        cx: &Context,
        at: u64,
        len_bytes: usize,
        eager: bool,
    ) -> Option<Fetch> {
        let mut parts = self.parts();
        // What is stale, or ends before what is wanted now, is in the way.
        if eager {
            self.remove(&mut parts, |one| one.data.is_some() && one.at <= at && at < one.end());
        }
        if parts.windows.iter().any(|one| one.overlaps((at, at.saturating_add(1)))) {
            return None;
        }
        let has_ended = |(end, since)| at >= end && !is_older(since, AGE_MAX);
        if parts.end.is_some_and(has_ended) {
            return None;
        }
        let mut place = self.core.windows.take(cx.taker()).ok();
        if place.is_none() {
            let goes = |one: &&ReadAheadWindow| one.data.is_some() && (eager || one.is_read);
            let oldest = parts.windows.iter().filter(goes);
            let oldest = oldest.min_by_key(|one| one.serial)?.serial;
            self.remove(&mut parts, |one| one.serial == oldest);
            place = self.core.windows.take(cx.taker()).ok();
        }
        let _place = place?;
        parts.serial += 1;
        let serial = parts.serial;
        let begun = dray_rt::now();
        parts.windows.push(ReadAheadWindow {
            serial,
            at,
            len_bytes,
            data: None,
            begun,
            is_read: false,
            _place,
        });
        drop(parts);
        self.core.activate(self);
        Some(Fetch { serial, at, len_bytes })
    }

    /// Reads a window. A change of the file meanwhile has discarded the window.
    async fn fetch(self: &Arc<Self>, file: &Arc<dyn OpenFile>, cx: &Context, fetch: Fetch) {
        let _fetching = Fetching { state: self, serial: fetch.serial };
        let read = file.read(cx, fetch.at, BufMut::heap(fetch.len_bytes)).await;
        let figures = &self.core.figures;
        add(&figures.ahead_requests, 1);
        if let Ok(data) = read {
            add(&figures.ahead_bytes, data.len() as u64);
            let mut parts = self.parts();
            let is_there = parts.windows.iter().any(|one| one.serial == fetch.serial);
            if is_there && data.len() < fetch.len_bytes {
                parts.end = Some((fetch.at + data.len() as u64, dray_rt::now()));
            }
            if data.is_empty() {
                return; // the window goes
            }
            if let Some(window) = parts.windows.iter_mut().find(|one| one.serial == fetch.serial) {
                add(&figures.ahead_held_bytes, data.len() as u64);
                window.data = Some(data.freeze());
            }
        }
    }

    /// Reads on in the background, where a stream is about to come.
    fn go_on_ahead(self: &Arc<Self>, wanted: &ClientRead<'_>, pattern: ReadPattern) {
        match pattern {
            ReadPattern::Sequential { run } if run >= AHEAD_FROM_RUN => {
                if let Some(next) = self.next_window(wanted) {
                    self.fetch_later(wanted, next, BLOCK_BYTES);
                }
            }
            ReadPattern::Strided { stride_bytes } => {
                for step in 1..=STRIDES_AHEAD {
                    let distance = stride_bytes.saturating_mul(step);
                    if let Some(at) = wanted.at.checked_add(distance) {
                        self.fetch_later(wanted, at, wanted.len_bytes);
                    }
                }
            }
            ReadPattern::Sequential { .. } | ReadPattern::None => {}
        }
    }

    /// Where the window begins that follows the one of this read; none: the file ends before.
    fn next_window(&self, wanted: &ClientRead<'_>) -> Option<u64> {
        let parts = self.parts();
        let whole = |one: &&ReadAheadWindow| one.at <= wanted.at && wanted.end() <= one.end();
        let window = parts.windows.iter().find(whole)?;
        let full = window.data.as_ref().is_some_and(|data| data.len() == window.len_bytes);
        full.then(|| window.end())
    }

    fn fetch_later(self: &Arc<Self>, wanted: &ClientRead<'_>, at: u64, len_bytes: usize) {
        let Some(fetch) = self.begin_window(wanted.cx, at, len_bytes, false) else { return };
        let (state, file, cx) = (self.clone(), wanted.file.clone(), later(wanted.cx));
        dray_rt::spawn(async move { state.fetch(&file, &cx, fetch).await });
    }

    fn remove(&self, parts: &mut Parts, goes: impl Fn(&ReadAheadWindow) -> bool) {
        parts.windows.retain(|window| {
            let gone = goes(window);
            if let Some(data) = window.data.as_ref().filter(|_| gone) {
                take(&self.core.figures.ahead_held_bytes, data.len() as u64);
            }
            !gone
        });
    }

    /// Forgets what was read ahead, or is being read, of these bytes. To be called before and after
    /// they are changed.
    pub(super) fn forget(&self, start: u64, end: u64) {
        let mut parts = self.parts();
        parts.end = None;
        if parts.windows.is_empty() {
            return;
        }
        self.remove(&mut parts, |window| window.overlaps((start, end)));
        drop(parts);
        self.changed.notify_waiters();
    }

    pub(super) fn forget_all(&self) {
        self.forget(0, u64::MAX);
    }

    pub(super) fn forget_older(&self, age_max: Duration) {
        let mut parts = self.parts();
        self.remove(&mut parts, |one| one.data.is_some() && is_older(one.begun, age_max));
    }
}

/// Bytes from `at` to the next boundary of a block that leaves room for a read of `least_bytes`.
fn to_boundary(at: u64, least_bytes: usize) -> usize {
    let block = BLOCK_BYTES as u64;
    let rest = (block - at % block) as usize;
    if rest >= least_bytes { rest } else { least_bytes }
}

/// A window that is being read. It is not waited for when its reader has failed or was dropped.
struct Fetching<'a> {
    state: &'a AggregatedFileState,
    serial: u64,
}

impl Drop for Fetching<'_> {
    fn drop(&mut self) {
        let mut parts = self.state.parts();
        parts.windows.retain(|one| one.serial != self.serial || one.data.is_some());
        drop(parts);
        self.state.changed.notify_waiters();
    }
}
