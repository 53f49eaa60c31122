{{/*
The parts of a pod.  They come from files/pod.yaml, which is that of the kustomize component, so both
add the same.  Call them with the root context, from this chart or from a chart that depends on it:
    initContainers:
      {{- include "speculation-controller.initContainers" . | nindent 8 }}
*/}}

{{- define "speculation-controller.name" -}}
{{ .Release.Name }}-speculation
{{- end }}

{{- define "speculation-controller.podLabels" -}}
{{- $scope := index (.Subcharts | default dict) "speculation-controller" | default . -}}
{{- $pod := $scope.Files.Get "files/pod.yaml" | fromYaml -}}
{{- toYaml $pod.metadata.labels -}}
{{- end }}

{{- define "speculation-controller.supplementalGroups" -}}
{{- $scope := index (.Subcharts | default dict) "speculation-controller" | default . -}}
{{- $pod := $scope.Files.Get "files/pod.yaml" | fromYaml -}}
{{- toYaml $pod.spec.securityContext.supplementalGroups -}}
{{- end }}

{{- define "speculation-controller.enginePort" -}}
{{- $scope := index (.Subcharts | default dict) "speculation-controller" | default . -}}
{{- if eq $scope.Values.engine.kind "vllm" }}8000{{ else }}30000{{ end -}}
{{- end }}

{{- define "speculation-controller.initContainers" -}}
{{- $scope := index (.Subcharts | default dict) "speculation-controller" | default . -}}
{{- $values := $scope.Values -}}
{{- $pod := $scope.Files.Get "files/pod.yaml" | fromYaml -}}
{{- $image := printf "%s:%s" $values.image.repository ($values.image.tag | default $scope.Chart.AppVersion) -}}
{{- $containers := list -}}
{{- range $container := $pod.spec.initContainers -}}
{{- $_ := set $container "image" $image -}}
{{- $_ := set $container "imagePullPolicy" $values.image.pullPolicy -}}
{{- if eq $container.name "controller" -}}
{{- $_ := set $container "resources" $values.resources -}}
{{- $containers = append $containers $container -}}
{{- else if $values.profile.enabled -}}
{{- $_ := set $container "resources" $values.profile.resources -}}
{{- range $item := $container.env -}}
{{- if eq $item.name "ENGINE_URL" -}}
{{- $_ := set $item "value" (printf "http://localhost:%s" (include "speculation-controller.enginePort" $scope)) -}}
{{- end -}}
{{- end -}}
{{- $containers = append $containers $container -}}
{{- end -}}
{{- end -}}
{{- toYaml $containers -}}
{{- end }}

{{- define "speculation-controller.engineEnv" -}}
- name: SPECULATION_SIDECAR
  value: unix:/run/speculation/controller.sock
{{- end }}

{{- define "speculation-controller.engineVolumeMounts" -}}
- name: speculation-socket
  mountPath: /run/speculation
  readOnly: true
{{- end }}

{{- define "speculation-controller.volumes" -}}
{{- $scope := index (.Subcharts | default dict) "speculation-controller" | default . -}}
{{- $pod := $scope.Files.Get "files/pod.yaml" | fromYaml -}}
{{- $name := include "speculation-controller.name" $scope -}}
{{- $volumes := list -}}
{{- range $volume := $pod.spec.volumes -}}
{{- if eq $volume.name "speculation-settings" -}}
{{- $_ := set $volume.configMap "name" $name -}}
{{- else if eq $volume.name "speculation-policy" -}}
{{- $_ := set $volume.configMap "name" (printf "%s-policy" $name) -}}
{{- else if and (eq $volume.name "speculation-state") $scope.Values.state.claim -}}
{{- $volume = dict "name" $volume.name "persistentVolumeClaim" (dict "claimName" $scope.Values.state.claim) -}}
{{- end -}}
{{- $volumes = append $volumes $volume -}}
{{- end -}}
{{- toYaml $volumes -}}
{{- end }}
