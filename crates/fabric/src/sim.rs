//! A simulated network: connections between tasks of one simulation, with the faults of
//! a real network under the control of a test.
//!
//! Frames keep their order within a connection, as on TCP. What a network does to packets (loss,
//! duplication, reordering) shows above TCP as delay and as connections that break with frames lost
//! in either direction. Those are the faults made here. The two ends need not learn of a break at
//! the same time. One end may have given the connection up, and come back on another. Meanwhile
//! what it sent still arrives at the other end of the first ([`Weather::linger_one_in`]).

mod counts;
mod listen;

use std::collections::BTreeMap;
use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};
use std::time::Duration;

use dray_core::{Buf, Fut};
use dray_rt::sync::mpsc;
use dray_rt::{Instant, now, random_u64, sleep, sleep_until};

use crate::connection::check_bounds;
use crate::{Connect, Connection, NOTICES_MAX, Peer, Sink, Unfinished};

pub use counts::Counts;
use counts::{FrameCounts, add};
pub use listen::SimListener;

/// What the network does to traffic, until it is configured otherwise.
#[derive(Clone, Copy, Debug)]
pub struct Weather {
    /// Shortest time of a frame on its way.
    pub delay_min: Duration,
    /// Longest time of a frame on its way.
    pub delay_max: Duration,
    /// One frame in so many breaks its connection; it and all later ones are lost.
    pub break_one_in: Option<u64>,
    /// A frame that breaks its connection may have been delivered all the same: then
    /// only what comes back is lost (a lost reply). One break in so many is of this kind.
    pub deliver_then_break_one_in: Option<u64>,
    /// When a connection ends, in one case of so many the end that did not end it learns of that
    /// late. Until then it receives what was under way, late too.
    pub linger_one_in: Option<u64>,
    /// How late at most.
    pub linger_max: Duration,
}

impl Default for Weather {
    fn default() -> Weather {
        Weather {
            delay_min: Duration::from_micros(5),
            delay_max: Duration::from_micros(200),
            break_one_in: None,
            deliver_then_break_one_in: None,
            linger_one_in: None,
            linger_max: Duration::from_millis(200),
        }
    }
}

impl Weather {
    /// How late the other end learns of an end, if it does so late.
    fn linger(&self) -> Option<Duration> {
        one_in(self.linger_one_in).then(|| up_to(self.linger_max))
    }
}

fn one_in(chance: Option<u64>) -> bool {
    chance.is_some_and(|chance| random_u64().is_multiple_of(chance.max(1)))
}

fn up_to(longest: Duration) -> Duration {
    Duration::from_nanos(random_u64() % (longest.as_nanos() as u64 + 1))
}

/// The network of a simulation.
#[derive(Clone, Default)]
pub struct Network {
    inner: Arc<Mutex<NetworkState>>,
    tally: Arc<FrameCounts>,
}

#[derive(Default)]
struct NetworkState {
    weather: Weather,
    listeners: BTreeMap<String, mpsc::UnboundedSender<SimConnection>>,
    partitioned: BTreeMap<String, bool>,
    /// Open connections by the names of their ends, to break them with either.
    links: Vec<([String; 2], Arc<Link>)>,
    /// The newest frame that arrived at either of two ends, over all their connections.
    newest: BTreeMap<[String; 2], Arc<Newest>>,
}

/// Numbers of frames, in the order of their sending.
type Newest = [AtomicU64; 2];

impl Network {
    /// A network in fair weather.
    pub fn new() -> Network {
        Network::default()
    }

    /// Changes what the network does from now on.
    pub fn set_weather(&self, weather: Weather) {
        self.lock().weather = weather;
    }

    /// Accepts connections to `name` until the listener is dropped.
    pub fn listen(&self, name: &str) -> SimListener {
        let (send, receive) = mpsc::unbounded_channel();
        self.lock().listeners.insert(name.to_owned(), send);
        SimListener::new(receive)
    }

    /// Cuts `name` off from everybody, or heals the cut. Nothing is delivered meanwhile;
    /// connections break.
    pub fn partition(&self, name: &str, cut: bool) {
        self.lock().partitioned.insert(name.to_owned(), cut);
        if cut {
            add(&self.tally.partitions, 1);
            for (_, link) in self.take_links(name) {
                link.end(0, None);
            }
        }
    }

    /// Breaks every connection with `name`, as the death of its process does.
    pub fn break_all(&self, name: &str) {
        let weather = self.lock().weather;
        for (ends, link) in self.take_links(name) {
            link.end(usize::from(ends[1] == name), weather.linger());
        }
    }

    /// Connections that broke so far, other than by being closed.
    pub fn breaks(&self) -> u64 {
        self.counts().breaks
    }

    /// What was done to the traffic so far.
    pub fn counts(&self) -> Counts {
        self.tally.counts()
    }

    fn take_links(&self, name: &str) -> Vec<([String; 2], Arc<Link>)> {
        let mut state = self.lock();
        let (gone, kept) = std::mem::take(&mut state.links)
            .into_iter()
            .partition::<Vec<_>, _>(|(ends, _)| ends.iter().any(|end| end == name));
        state.links = kept;
        add(&self.tally.breaks, gone.len() as u64);
        gone
    }

    /// Connects somebody without a name to `name`, over and over if need be.
    pub fn connector(&self, name: &str) -> Arc<dyn Connect> {
        self.connector_from("", name)
    }

    /// Connects `from` to `name`, over and over if need be.
    pub fn connector_from(&self, from: &str, name: &str) -> Arc<dyn Connect> {
        let ends = [from.to_owned(), name.to_owned()];
        Arc::new(SimConnect { network: self.clone(), ends })
    }

    /// Where to connect from the first end to the second, if there is a way.
    fn listener(&self, ends: &[String; 2]) -> Option<mpsc::UnboundedSender<SimConnection>> {
        let state = self.lock();
        let cut = |end: &String| state.partitioned.get(end).copied().unwrap_or(false);
        if ends.iter().any(cut) { None } else { state.listeners.get(&ends[1]).cloned() }
    }

    fn lock(&self) -> MutexGuard<'_, NetworkState> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct SimConnect {
    network: Network,
    ends: [String; 2],
}

impl Connect for SimConnect {
    fn connect(&self) -> Fut<'_, io::Result<Arc<dyn Connection>>> {
        Box::pin(async move {
            let weather = self.network.lock().weather;
            sleep(weather.delay_max).await;
            let refused = || io::Error::from_raw_os_error(libc::ECONNREFUSED);
            let listener = self.network.listener(&self.ends).ok_or_else(refused)?;
            let newest = self.network.lock().newest.entry(self.ends.clone()).or_default().clone();
            let tally = self.network.tally.clone();
            let link = Arc::new(Link { ends: Mutex::default(), newest, tally });
            let end =
                |side| SimConnection { link: link.clone(), side, network: self.network.clone() };
            listener.send(end(1)).map_err(|_| refused())?;
            let mine: Arc<dyn Connection> = Arc::new(end(0));
            let mut state = self.network.lock();
            state.links.retain(|(_, link)| !link.is_over());
            state.links.push((self.ends.clone(), link));
            Ok(mine)
        })
    }

    fn target(&self) -> String {
        format!("sim://{}", self.ends[1])
    }
}

/// Both directions of one connection.
struct Link {
    /// What side 0 and side 1 have yet to learn.
    ends: Mutex<[End; 2]>,
    newest: Arc<Newest>,
    tally: Arc<FrameCounts>,
}

/// A frame on its way.
struct Frame {
    due: Instant,
    number: u64,
    head: Vec<u8>,
    data: Option<Buf>,
    is_notice: bool,
}

/// One end of a link, as a receiver.
#[derive(Default)]
struct End {
    frames: VecDeque<Frame>,
    /// Nothing more gets on its way to this end.
    cut: bool,
    /// When it learns that the other end is gone.
    reported_at: Option<Instant>,
    /// This end is over: nothing is received or sent here any more.
    over: bool,
    waker: Option<Waker>,
}

impl End {
    /// Answers how many frames it will not receive, and whom to wake.
    fn end(&mut self) -> (usize, Option<Waker>) {
        self.over = true;
        let lost = self.frames.len();
        self.frames.clear();
        (lost, self.waker.take())
    }

    /// Everything under way, and what is said of the other end behind it, comes this late.
    fn delay(&mut self, late: Duration) -> Option<Waker> {
        self.cut = true;
        let until = now() + late;
        let mut last = now();
        for frame in &mut self.frames {
            frame.due = frame.due.max(until);
            last = frame.due;
        }
        self.reported_at = Some(last.max(until));
        self.waker.take()
    }
}

impl Link {
    fn lock(&self) -> MutexGuard<'_, [End; 2]> {
        self.ends.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a frame that arrives at `side`; its parts.
    fn arrives(&self, frame: Frame, side: usize, late: bool) -> (Vec<u8>, Option<Buf>) {
        add(&self.tally.late, u64::from(late));
        let newest = self.newest[side].fetch_max(frame.number, Ordering::Relaxed);
        add(&self.tally.overtaken, u64::from(newest > frame.number));
        (frame.head, frame.data)
    }

    fn is_over(&self) -> bool {
        self.lock().iter().all(|end| end.over)
    }

    /// Side `first` is over now, the other one too or late.
    fn end(&self, first: usize, late: Option<Duration>) {
        let mut ends = self.lock();
        let other = &mut ends[1 - first];
        let (lost, woken) = match late {
            _ if other.reported_at.is_some() || other.over => (0, None),
            None => other.end(),
            Some(late) => (0, other.delay(late)),
        };
        self.tally.lost(first, lost);
        let (lost, own) = ends[first].end();
        self.tally.lost(1 - first, lost);
        let wakers = [own, woken];
        drop(ends);
        wakers.into_iter().flatten().for_each(Waker::wake);
    }
}

/// One end of a simulated connection.
pub struct SimConnection {
    link: Arc<Link>,
    side: usize,
    network: Network,
}

impl Connection for SimConnection {
    fn send(&self, head: &[u8], data: Option<Buf>) -> io::Result<()> {
        self.put(head, data, false)
    }

    fn notify(&self, head: &[u8]) -> io::Result<()> {
        let ends = self.link.lock();
        let notices = ends[1 - self.side].frames.iter().filter(|frame| frame.is_notice).count();
        drop(ends);
        match notices < NOTICES_MAX {
            true => self.put(head, None, true),
            false => Err(io::ErrorKind::WouldBlock.into()),
        }
    }

    fn run<'a>(&'a self, sink: &'a mut dyn Sink) -> Fut<'a, io::Error> {
        Box::pin(async move {
            while let Some((head, data)) = self.next().await {
                if let Err(error) = deliver(sink, &head, data).await {
                    self.close();
                    return error;
                }
            }
            io::Error::from_raw_os_error(libc::ECONNRESET)
        })
    }

    fn close(&self) {
        let weather = self.network.lock().weather;
        self.link.end(self.side, weather.linger());
    }

    fn queued_frames(&self) -> usize {
        let ends = self.link.lock();
        ends[1 - self.side].frames.iter().filter(|frame| !frame.is_notice).count()
    }

    /// Nothing: frames arrive whole here, and nobody stops reading.
    fn unfinished(&self) -> Unfinished {
        Unfinished::default()
    }

    fn peer(&self) -> Peer {
        Peer::Local
    }
}

impl SimConnection {
    fn put(&self, head: &[u8], data: Option<Buf>, is_notice: bool) -> io::Result<()> {
        check_bounds(head, data.as_ref().map_or(0, Buf::len))?;
        let weather = self.network.lock().weather;
        let breaks = one_in(weather.break_one_in);
        let delivered = !breaks || one_in(weather.deliver_then_break_one_in);
        let delay = weather.delay_min + up_to(weather.delay_max.saturating_sub(weather.delay_min));
        let mut ends = self.link.lock();
        if ends[self.side].over {
            return Err(io::Error::from_raw_os_error(libc::EPIPE));
        }
        let way = &mut ends[1 - self.side];
        let number = self.link.tally.frames.fetch_add(1, Ordering::Relaxed) + 1;
        if way.over || way.cut {
            self.link.tally.lost(self.side, 1);
            return Ok(()); // nobody says that it is lost
        }
        if delivered {
            let last = way.frames.back().map(|frame| frame.due);
            let due = last.map_or(now() + delay, |last| last.max(now() + delay));
            way.frames.push_back(Frame { due, number, head: head.to_vec(), data, is_notice });
            way.waker.take().into_iter().for_each(Waker::wake);
        } else {
            self.link.tally.lost(self.side, 1);
        }
        if breaks {
            way.cut = true; // what comes behind it is lost with it
            drop(ends);
            add(&self.link.tally.breaks, 1);
            self.break_soon(weather, delay);
        }
        Ok(())
    }

    /// Ends the connection soon: one end notices. The sender's end notices where the other end
    /// still gets what is under way, late. That can be a reply that is waited for in vain, or a
    /// call that arrives after it was repeated.
    fn break_soon(&self, weather: Weather, delay: Duration) {
        let late = weather.linger();
        let (link, side) = (self.link.clone(), self.side);
        // What is under way must not have arrived before it is held up.
        let wait = if late.is_some() { delay / 2 } else { weather.delay_max };
        dray_rt::spawn(async move {
            sleep(wait + Duration::from_nanos(1)).await;
            link.end(side, late);
        });
    }

    /// The next frame when it is due; none once this end is over.
    async fn next(&self) -> Option<(Vec<u8>, Option<Buf>)> {
        let take = |end: &mut End| {
            let late = end.reported_at.is_some();
            end.frames.pop_front().map(|frame| self.link.arrives(frame, self.side, late))
        };
        self.when_due(take).await.flatten()
    }

    /// What `look` finds at this end when a frame is due; none once the end is over.
    async fn when_due<T>(&self, look: impl Fn(&mut End) -> T) -> Option<T> {
        let mut timer: Option<(Instant, dray_rt::Sleep)> = None;
        std::future::poll_fn(|cx| {
            let mut ends = self.link.lock();
            let end = &mut ends[self.side];
            if end.over {
                return Poll::Ready(None);
            }
            let due = end.frames.front().map(|frame| frame.due);
            match due.or(end.reported_at) {
                Some(due) if due <= now() => {
                    end.over = end.frames.is_empty();
                    return Poll::Ready((!end.over).then(|| look(end)));
                }
                Some(due) if timer.as_ref().is_none_or(|(set, _)| *set != due) => {
                    timer = Some((due, sleep_until(due)));
                }
                Some(_) => {}
                None => timer = None,
            }
            end.waker = Some(cx.waker().clone());
            drop(ends);
            if let Some((_, timer)) = &mut timer
                && std::pin::Pin::new(timer).poll(cx).is_ready()
            {
                cx.waker().wake_by_ref(); // due now
            }
            Poll::Pending
        })
        .await
    }
}

async fn deliver(sink: &mut dyn Sink, head: &[u8], data: Option<Buf>) -> io::Result<()> {
    let Some(data) = data.filter(|data| !data.is_empty()) else {
        let beside = std::future::poll_fn(|cx| sink.poll_head(cx, head)).await?;
        return sink.frame(head, beside);
    };
    let mut into = std::future::poll_fn(|cx| sink.poll_place(cx, head, data.len())).await?;
    into.put(&data);
    sink.frame(head, Some(into))
}

impl Drop for SimConnection {
    fn drop(&mut self) {
        self.close(); // the end of a process closes its connections
    }
}
