//! `kubectl` as a child process: what a cluster's user types, with JSON as the answer.

use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

#[derive(Clone, Debug)]
pub struct Kubectl {
    program: PathBuf,
    kubeconfig: PathBuf,
}

/// An Event, as far as the suite looks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    pub kind: String,
    pub name: String,
    pub reason: String,
    pub message: String,
    /// How often it was seen, however the reporter counts.
    pub count: u64,
    pub warning: bool,
}

impl Kubectl {
    pub fn new(program: PathBuf, kubeconfig: PathBuf) -> Self {
        Self { program, kubeconfig }
    }

    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command.arg("--kubeconfig").arg(&self.kubeconfig).args(arguments);
        command
    }

    /// For scripts that call kubectl themselves.
    pub fn words(&self) -> String {
        format!("{} --kubeconfig {}", self.program.display(), self.kubeconfig.display())
    }

    fn output(&self, arguments: &[&str], input: Option<&str>) -> Result<Output> {
        let mut command = self.command(arguments);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().with_context(|| format!("start {}", self.program.display()))?;
        let mut stdin = child.stdin.take().context("stdin is piped")?;
        let input = input.unwrap_or_default().to_owned();
        // Written from a thread: kubectl may answer before it has read everything.
        let writer = std::thread::spawn(move || stdin.write_all(input.as_bytes()));
        let output = child.wait_with_output()?;
        let _ = writer.join(); // a closed pipe: kubectl says itself what was wrong
        Ok(output)
    }

    fn checked(&self, arguments: &[&str], input: Option<&str>) -> Result<String> {
        let output = self.output(arguments, input)?;
        if !output.status.success() {
            bail!("kubectl {}: {}", arguments.join(" "), String::from_utf8_lossy(&output.stderr).trim());
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    pub fn run(&self, arguments: &[&str]) -> Result<String> {
        self.checked(arguments, None)
    }

    /// Applies objects, each given as JSON.
    pub fn apply(&self, objects: &[Value]) -> Result<()> {
        let list = serde_json::json!({ "apiVersion": "v1", "kind": "List", "items": objects });
        self.checked(&["apply", "-f", "-"], Some(&list.to_string())).map(drop)
    }

    /// What `kubectl apply` says against an object that it must refuse.
    pub fn refused(&self, object: &Value) -> Result<String> {
        let output = self.output(&["apply", "-f", "-"], Some(&object.to_string()))?;
        if output.status.success() {
            bail!("the API server took what it should have refused: {object}");
        }
        Ok(String::from_utf8_lossy(&output.stderr).trim().to_owned())
    }

    /// One object; `namespace` "" for kinds without.
    pub fn get(&self, kind: &str, namespace: &str, name: &str) -> Result<Value> {
        let mut arguments = vec!["get", kind, name, "-o", "json"];
        if !namespace.is_empty() {
            arguments.extend(["-n", namespace]);
        }
        Ok(serde_json::from_str(&self.run(&arguments)?)?)
    }

    /// All objects of a kind; `scope`: "" for kinds without namespace, "*" for all namespaces.
    pub fn list(&self, kind: &str, scope: &str, more: &[&str]) -> Result<Vec<Value>> {
        let mut arguments = vec!["get", kind, "-o", "json"];
        match scope {
            "" => {}
            "*" => arguments.push("-A"),
            namespace => arguments.extend(["-n", namespace]),
        }
        arguments.extend(more);
        let list: Value = serde_json::from_str(&self.run(&arguments)?)?;
        Ok(list["items"].as_array().cloned().unwrap_or_default())
    }

    pub fn delete(&self, kind: &str, namespace: &str, name: &str) -> Result<()> {
        self.run(&["delete", kind, name, "-n", namespace, "--wait=false", "--ignore-not-found"]).map(drop)
    }

    pub fn exists(&self, kind: &str, namespace: &str, name: &str) -> Result<bool> {
        let mut arguments = vec!["get", kind, name, "--ignore-not-found", "-o", "name"];
        if !namespace.is_empty() {
            arguments.extend(["-n", namespace]);
        }
        Ok(!self.run(&arguments)?.trim().is_empty())
    }

    pub fn logs(&self, namespace: &str, pod: &str, container: &str) -> Result<String> {
        self.run(&["logs", "-n", namespace, pod, "-c", container])
    }

    pub fn exec(&self, namespace: &str, pod: &str, container: &str, words: &[&str]) -> Result<String> {
        let mut arguments = vec!["exec", "-n", namespace, pod, "-c", container, "--"];
        arguments.extend(words);
        self.run(&arguments)
    }

    /// Events about one object.
    pub fn events(&self, namespace: &str, kind: &str, name: &str) -> Result<Vec<Event>> {
        let selector = format!("involvedObject.kind={kind},involvedObject.name={name}");
        let items = self.list("events", namespace, &["--field-selector", &selector])?;
        Ok(items.iter().map(Event::read).collect())
    }

    /// What a user sees of an object; for the report of a failure.
    pub fn describe(&self, kind: &str, namespace: &str, name: &str) -> String {
        let mut arguments = vec!["describe", kind, "-n", namespace];
        arguments.extend((!name.is_empty()).then_some(name));
        self.run(&arguments).unwrap_or_else(|e| format!("{e:#}"))
    }

    /// Asks until there is an answer; an error of one attempt is asked again, and named in the end.
    pub fn wait<T>(
        &self,
        what: &str,
        limit: Duration,
        mut ask: impl FnMut(&Self) -> Result<Option<T>>,
    ) -> Result<T> {
        let end = Instant::now() + limit;
        loop {
            let answer = ask(self);
            if let Ok(Some(value)) = answer {
                return Ok(value);
            }
            if Instant::now() >= end {
                return match answer {
                    Err(e) => Err(e.context(format!("{what}: not within {limit:?}"))),
                    Ok(_) => bail!("{what}: not within {limit:?}"),
                };
            }
            std::thread::sleep(Duration::from_millis(200));
        }
    }
}

impl Event {
    fn read(item: &Value) -> Self {
        let text = |v: &Value| v.as_str().unwrap_or_default().to_owned();
        let series = item["series"]["count"].as_u64();
        Self {
            kind: text(&item["involvedObject"]["kind"]),
            name: text(&item["involvedObject"]["name"]),
            reason: text(&item["reason"]),
            message: text(&item["message"]),
            count: series.or(item["count"].as_u64()).unwrap_or(1),
            warning: item["type"] == "Warning",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn an_event_is_counted_however_its_reporter_counts() {
        let event = |more: Value| {
            let mut item = json!({
                "involvedObject": { "kind": "Pod", "name": "p" }, "reason": "R", "message": "m", "type": "Warning",
            });
            for (key, value) in more.as_object().unwrap() {
                item[key] = value.clone();
            }
            Event::read(&item)
        };
        assert_eq!(event(json!({})).count, 1);
        assert_eq!(event(json!({ "count": 7 })).count, 7);
        assert_eq!(event(json!({ "count": null, "series": { "count": 9 } })).count, 9);
        assert!(event(json!({})).warning && !event(json!({ "type": "Normal" })).warning);
    }
}
